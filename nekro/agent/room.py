"""The room of a prompt: how its parts share the tokens of a model's context, as settings or endpoints state
it."""

from __future__ import annotations

import asyncio
import math
import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from loguru import logger

from broker_config.model_groups import ModelGroup
from broker_config.settings import AgentSettings
from nekro.agent.model import ImagePart, PromptMessage
from nekro.agent.tokens import ESTIMATE, TokenCounter, counter_of

__all__ = [
    "LEARNED_SECONDS",
    "LOW_SIDE",
    "MOST_TOKENS",
    "Limits",
    "ModelContexts",
    "PromptRoom",
    "tokens_of_image",
    "tokens_of_prompt",
]


#: Longest side in pixels at which models read an image of detail ``low``.
LOW_SIDE: Final = 512
_BASE: Final = 85
_PER_TILE: Final = 170
_TILE: Final = 512
_LONGEST_SIDE: Final = 2048
_SHORTEST_SIDE: Final = 768
#: Most tokens of one image: 2048 by 768 pixels are 4 by 2 tiles.
MOST_TOKENS: Final = _BASE + 8 * _PER_TILE


def tokens_of_image(width: int, height: int, detail: str | None = None) -> int:
    """Estimate the input tokens of an image; models of other makers count differently.

    Args:
        width, height: pixels, >= 1.
        detail: ``low``, ``high`` or ``auto``; None and ``auto`` count as ``high``.

    Source: https://platform.openai.com/docs/guides/images-vision, models that count tiles of 512 pixels.

    >>> tokens_of_image(1024, 1024), tokens_of_image(2048, 4096), tokens_of_image(4096, 8192, "low")
    (765, 1105, 85)
    """
    if detail == "low":
        return _BASE
    scale = min(1.0, _LONGEST_SIDE / max(width, height))
    scale = min(scale, _SHORTEST_SIDE / min(width, height))
    across, down = (max(1, math.ceil(round(side * scale) / _TILE)) for side in (width, height))
    return _BASE + _PER_TILE * across * down


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


#: How long a length that an endpoint refused is avoided: its operator may load another model meanwhile.
LEARNED_SECONDS: Final = 3600.0
#: How endpoints state the length of a context. It is text of theirs: the number only lowers a limit.
_STATED: Final = re.compile(
    r"(?:context (?:length|window|size)|n_ctx)\D{0,40}?(\d{3,9})|> ?(\d{3,9}) maximum", re.IGNORECASE
)


class ModelContexts:
    """Finds the room of prompts; the learned part is that of this process.

    Args:
        find: returns the model group of a name, or of None; None if nothing is known of it.
        clock: seconds that only go forward.
    """

    def __init__(
        self,
        settings: AgentSettings,
        find: Callable[[str | None], ModelGroup | None] = lambda _name: None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings
        self._find = find
        self._clock = clock
        #: By name of the group: the longest prompt, and until when that counts.
        self._learned: dict[str | None, tuple[int, float]] = {}
        #: By model.
        self._counters: dict[str, TokenCounter] = {}

    async def room(self, name: str | None) -> PromptRoom:
        """Return the room of a prompt for a model group; reading a tokenizer's table does not block."""
        group = self._find(name)
        longest, until = self._learned.get(name, (None, 0.0))
        if until <= self._clock():
            longest = None
        limits = Limits.of(
            self._settings, context=None if group is None else group.context_tokens, longest=longest
        )
        if group is None or not group.model:
            return PromptRoom(limits=limits)
        counter = self._counters.get(group.model)
        if counter is None:
            # Only the first use of a model may have to read the table of its tokenizer, so only that one
            # waits for a thread, which takes longer than building a prompt.
            counter = self._counters[group.model] = await asyncio.to_thread(counter_of, group.model)
        return PromptRoom(limits=limits, counter=counter)

    def learn(self, name: str | None, *, tokens: int, said: str) -> None:
        """Record that an endpoint of a group refused a prompt as too long.

        Args:
            tokens: those of the prompt by the group's counter.
            said: the endpoint's words, which may state the length of its context.
        """
        longest = tokens // 2
        stated = _STATED.search(said)
        if stated:
            context = int(stated[1] or stated[2])
            longest = min(tokens * 3 // 4, context - min(self._settings.answer_tokens, context // 2))
        self._learned[name] = (max(longest, 1), self._clock() + LEARNED_SECONDS)
        logger.bind(group=name, tokens=tokens, longest=longest).warning("context_learned")
