"""The agent's port to a language model: requests, answers, their price, and the client of a worker without
one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NoReturn, Protocol

from nekro_agent.errors import LLMError

if TYPE_CHECKING:
    from nekro.agent.model import PromptMessage

__all__ = [
    "FailedGroup",
    "LLMAnswer",
    "LLMClient",
    "LLMRequest",
    "MissingClient",
    "ModelSpent",
    "cost_of",
    "was_withheld",
]


def cost_of(
    prompt_tokens: int,
    answer_tokens: int,
    cached_tokens: int = 0,
    *,
    input_price: float,
    output_price: float,
    cached_input_price: float | None = None,
) -> float:
    """Return the cost of a request, in the currency of the prices.

    Args:
        cached_tokens: a part of the prompt; more than it, and less than 0, are not counted.
        input_price: of a million tokens, as the other prices.
        cached_input_price: None means ``input_price``.
    """
    if cached_input_price is None:
        cached_input_price = input_price
    cached = min(max(cached_tokens, 0), prompt_tokens)
    prompt = (prompt_tokens - cached) * input_price + cached * cached_input_price
    return (prompt + answer_tokens * output_price) / 1_000_000


#: Reasons to finish that mean that the model ended its answer, of the protocol and in the words of endpoints
#: that pass on those of Anthropic, Gemini, Cohere, TGI and others. Each other one is a cut.
_ENDS: Final = frozenset([
    "", "stop", "end_turn", "stop_sequence", "eos", "eos_token", "end", "complete", "completed", "finished",
    "tool_calls", "tool_call", "tool_use", "function_call",
])  # fmt: skip
#: Reasons to finish that mean that a filter withheld the answer or the rest of it, in the same words.
_WITHHELD: Final = frozenset([
    "content_filter", "refusal", "safety", "recitation", "blocklist", "prohibited_content", "spii",
])  # fmt: skip


def was_withheld(finish_reason: str) -> bool:
    """Whether a filter ended the answer."""
    return finish_reason.lower() in _WITHHELD


@dataclass(frozen=True, kw_only=True)
class ModelSpent:
    """What one request to an endpoint used, also one that failed.

    ``model`` is the one that was asked for. Tokens are estimated where the endpoint reports none, or no
    possible number.
    """

    group: str
    model: str
    prompt_tokens: int
    answer_tokens: int
    cost: float
    #: Whether some of the tokens are an estimate.
    is_estimated: bool = False


@dataclass(frozen=True, kw_only=True)
class LLMRequest:
    """One prompt; ``round_id`` and ``chat_key`` are used only in the record of the request."""

    messages: tuple[PromptMessage, ...]
    round_id: str = ""
    chat_key: str = ""
    #: The model group that the chat has chosen; None means ``default``.
    group: str | None = None
    #: Called with the number of the try, from 1, and each piece of text as it arrives; must not block. A
    #: try that fails leaves a text that the next one does not continue.
    on_delta: Callable[[int, str], None] | None = field(default=None, compare=False, repr=False)
    #: Called after each request that was sent, also one that failed or was cancelled; must not block.
    on_spent: Callable[[ModelSpent], None] | None = field(default=None, compare=False, repr=False)

    @property
    def chars(self) -> int:
        """Characters of text in the prompt, without images."""
        return sum(len(message.text) for message in self.messages)


@dataclass(frozen=True, kw_only=True)
class FailedGroup:
    """A model group that was asked before the one that answered; ``code`` is that of its error."""

    group: str
    model: str
    code: str
    error: str


@dataclass(frozen=True, kw_only=True)
class LLMAnswer:
    """One complete answer.

    ``model`` is the model that answered, as the endpoint names it; token counts are estimates if the
    endpoint does not report them, and ``is_estimated`` says so; ``tries`` is the number of requests
    sent, including failed ones; ``cost`` is in the currency of the prices in the settings. ``text`` may be
    empty.
    """

    text: str
    model: str
    prompt_tokens: int | None
    answer_tokens: int | None
    finish_reason: str
    tries: int
    cost: float
    is_estimated: bool = False
    #: Whether ``text`` is the model's refusal to answer, which the protocol has a field for.
    is_refusal: bool = False
    #: Names of the tools that the answer calls in the protocol's own way; no request offers any.
    tool_calls: tuple[str, ...] = ()
    #: The model group that answered.
    group: str = "default"
    #: The groups that were asked before it, in order.
    failed: tuple[FailedGroup, ...] = ()

    @property
    def was_cut(self) -> bool:
        """Whether the endpoint ended the answer early: at a limit, by an abort, or for an unknown reason."""
        return self.finish_reason.lower() not in _ENDS


class LLMClient(Protocol):
    """A client of a model; bound to the event loop of its first use."""

    async def complete(self, request: LLMRequest) -> LLMAnswer:
        """Return the model's answer.

        Raises:
            LLMError: no answer after all tries; its message names status, model and endpoint.
        """
        ...

    async def close(self) -> None:
        """Release connections; the client cannot be used afterwards."""
        ...


class MissingClient:
    """Answers every request with the reason why there is no model."""

    def __init__(self, reason: str) -> None:
        """``reason`` is the text of the error; it names the settings."""
        self._reason = reason

    async def complete(self, request: LLMRequest) -> NoReturn:
        """Fail.

        Raises:
            LLMError: always.
        """
        raise LLMError(self._reason)

    async def close(self) -> None:
        """Do nothing."""
