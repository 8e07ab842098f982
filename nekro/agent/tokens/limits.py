"""How the parts of a prompt share the tokens of a model's context."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from broker_config.settings import AgentSettings
from nekro.agent.model import ImagePart, PromptMessage
from nekro.agent.pictures.tokens import MOST_TOKENS
from nekro.agent.tokens.counter import ESTIMATE, TokenCounter

__all__ = ["Limits", "PromptRoom", "tokens_of_prompt"]

#: Tokens that endpoints add to each message, for its role and its ends.
_PER_MESSAGE: Final = 4


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Most tokens of a prompt and of its parts."""

    prompt: int
    #: The list of plugins and methods; 0 means no limit of its own.
    catalogue: int
    history: int
    #: One result of a method, one output of a program, or what one plugin adds to prompts.
    observation: int
    #: One answer of the model in an earlier round.
    answer: int

    @classmethod
    def of(cls, settings: AgentSettings, *, context: int | None, longest: int | None = None) -> Limits:
        """Return the limits for a model.

        Args:
            context: tokens of the model's context, its answer included; None if it is not known.
            longest: most tokens of a prompt, as learned from the endpoint; None if nothing was.
        """
        prompt = settings.prompt_tokens
        if context is not None:
            prompt = min(prompt, context - min(settings.answer_tokens, context // 2))
        if longest is not None:
            prompt = min(prompt, longest)
        return cls(
            prompt=prompt,
            catalogue=min(settings.catalogue_tokens, prompt * 2 // 5),
            history=min(settings.history_tokens, prompt // 4),
            observation=min(settings.observation_tokens, prompt // 8),
            answer=prompt // 4,
        )

    @property
    def images(self) -> int:
        """All images together."""
        return self.prompt // 4

    @property
    def message(self) -> int:
        """One message of the history."""
        return self.history // 5

    @property
    def summary(self) -> int:
        """The summary of older messages, which is a part of the history."""
        return self.history // 4

    def lowered(self) -> Limits:
        """Return the limits of the next try, if the parts together are too long."""
        return Limits(
            prompt=self.prompt,
            catalogue=self.catalogue // 2 if self.catalogue else self.prompt * 2 // 5,
            history=self.history // 2,
            observation=self.observation // 2,
            answer=self.answer // 2,
        )


def tokens_of_prompt(messages: Iterable[PromptMessage]) -> int:
    """Estimate the tokens of messages; images count as the largest."""
    texts = images = 0
    for message in messages:
        texts += _PER_MESSAGE + ESTIMATE.count(message.text)
        images += sum(isinstance(part, ImagePart) for part in message.parts)
    return texts + images * MOST_TOKENS


@dataclass(frozen=True, kw_only=True)
class PromptRoom:
    """The limits of one prompt, and the counter of its model."""

    limits: Limits
    counter: TokenCounter = ESTIMATE

    def tokens_of(self, messages: Iterable[PromptMessage]) -> int:
        """Return the tokens of messages; images count as the largest, together no more than they may have."""
        texts = images = 0
        for message in messages:
            texts += _PER_MESSAGE + self.counter.count(message.text)
            images += sum(isinstance(part, ImagePart) for part in message.parts)
        return texts + min(images * MOST_TOKENS, self.limits.images)
