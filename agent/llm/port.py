"""What the agent needs from a language model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from agent.model import PromptMessage

__all__ = ["LLMAnswer", "LLMClient", "LLMRequest"]


@dataclass(frozen=True, kw_only=True)
class LLMRequest:
    """One prompt; ``round_id`` and ``chat_key`` only label the record of the request."""

    messages: tuple[PromptMessage, ...]
    round_id: str = ""
    chat_key: str = ""

    @property
    def chars(self) -> int:
        """Characters of text in the prompt, images left out."""
        return sum(len(message.text) for message in self.messages)


@dataclass(frozen=True, kw_only=True)
class LLMAnswer:
    """One complete answer.

    ``model`` is the one that answered, as the endpoint names it; token counts are None where
    the endpoint does not say; ``tries`` counts the requests that were sent, the failed ones
    included; ``cost`` is in the currency of the prices in the settings.
    """

    text: str
    model: str
    prompt_tokens: int | None
    answer_tokens: int | None
    finish_reason: str
    tries: int
    cost: float

    @property
    def was_cut(self) -> bool:
        """Whether the answer ended at the limit of its length, in the middle of a thought or of code."""
        return self.finish_reason == "length"


class LLMClient(Protocol):
    """Asks a model; bound to the event loop that it is first used on."""

    async def complete(self, request: LLMRequest) -> LLMAnswer:
        """Return the model's answer.

        Raises:
            LLMError: no answer after all tries; its message names status, model and endpoint.
        """
        ...

    async def close(self) -> None:
        """Release connections; the client cannot be used afterwards."""
        ...
