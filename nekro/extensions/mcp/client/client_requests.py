"""What servers ask for during a call, as values, and the interface of what serves it.

It needs no SDK, so that workers without servers load none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from nekro.extensions.mcp.client.declarations import Sampling
from nekro_agent.schemas.agent_ctx import AgentCtx

__all__ = ["ClientRequests", "Completion", "Prompt", "Question", "Reply"]


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """A server's request to a language model."""

    #: In the form of OpenAI's chat API; every word is the server's.
    messages: list[dict[str, Any]]
    #: Longest answer, at most what the declaration allows.
    max_tokens: int
    temperature: float | None
    stop: list[str] | None
    #: Estimate of the tokens of ``messages``.
    tokens: int


@dataclass(frozen=True, kw_only=True)
class Completion:
    """A model's answer."""

    text: str
    model: str


@dataclass(frozen=True, kw_only=True)
class Question:
    """A server's question to a person; every text is the server's."""

    server: str
    #: Name of the method that was called.
    tool: str
    text: str
    #: JSON schema of the fields of the answer, of simple types; None for a question with a URL.
    schema: Mapping[str, Any] | None = None
    #: Address that the person is asked to open.
    url: str | None = None
    #: Progress of the call so far.
    percent: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Reply:
    """What a person answered; ``cancel`` without an answer."""

    action: Literal["accept", "decline", "cancel"]
    content: dict[str, Any] | None = None


class ClientRequests(Protocol):
    """Serves what servers ask for."""

    async def complete(self, prompt: Prompt, *, server: str, sampling: Sampling) -> Completion:
        """Ask a language model, within the budget of the declaration.

        Raises:
            NekroError: the budget is used up, the group of models is unknown, or the model did not answer.
        """
        ...

    async def ask(self, question: Question, ctx: AgentCtx, *, seconds: float) -> Reply:
        """Ask the people of the call's chat, and wait for an answer.

        Raises:
            NekroError: the call belongs to no chat, or the database does not answer.
        """
        ...
