"""What a round is made from and what comes out of it: plain frozen values, no database, no broker."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Any

from nekro_agent.methods import SandboxMethodType
from nekro_agent.ports import MessageKind
from sandbox.models import StopType

__all__ = [
    "ChatBrief",
    "HistoryMessage",
    "ImagePart",
    "InjectedPrompt",
    "MethodBrief",
    "Observation",
    "Part",
    "PluginBrief",
    "PromptMessage",
    "Role",
    "TextPart",
    "TurnRound",
]


class Role(StrEnum):
    """Who a message of a prompt comes from."""

    #: The host's instructions.
    SYSTEM = "system"
    #: Everything the model reads: chat, observations, notices.
    USER = "user"
    #: What the model answered earlier in this turn.
    ASSISTANT = "assistant"


@dataclass(frozen=True, kw_only=True)
class TextPart:
    """Text of a prompt message."""

    text: str


@dataclass(frozen=True, kw_only=True)
class ImagePart:
    """An image of a prompt message; ``url`` is a data URL or an http(s) URL."""

    url: str
    detail: str | None = None


Part = TextPart | ImagePart


@dataclass(frozen=True, kw_only=True)
class PromptMessage:
    """One message of an LLM request."""

    role: Role
    parts: tuple[Part, ...]

    @property
    def text(self) -> str:
        """The text parts, joined by line feeds."""
        return "\n".join(part.text for part in self.parts if isinstance(part, TextPart))

    @property
    def images(self) -> tuple[ImagePart, ...]:
        """The image parts, in order."""
        return tuple(part for part in self.parts if isinstance(part, ImagePart))

    @classmethod
    def of(cls, role: Role, text: str) -> PromptMessage:
        """Build a message of one text part."""
        return cls(role=role, parts=(TextPart(text=text),))


@dataclass(frozen=True, kw_only=True)
class ChatBrief:
    """The chat that a round belongs to."""

    chat_key: str
    container_key: str
    adapter_key: str | None = None
    channel_name: str | None = None
    channel_type: str | None = None


@dataclass(frozen=True, kw_only=True)
class HistoryMessage:
    """One message of the chat, as the prompt shows it.

    ``observation_of`` is set on the system message that keeps a call's result for later
    turns: the id of that call. The turn that the result woke shows it as an observation
    instead. What a method sent into the chat while it ran is no such message.
    """

    message_id: str
    kind: MessageKind
    text: str
    sent_at: datetime
    sender_name: str = ""
    sender_id: str = ""
    attachments: tuple[str, ...] = ()
    observation_of: str | None = None


@dataclass(frozen=True, kw_only=True)
class Observation:
    """The result of an AGENT or MULTIMODAL_AGENT call.

    ``text`` is an AGENT's result; ``segments`` is a MULTIMODAL_AGENT's, as ``Envelope.segments``
    or in any other shape that ``nekro_agent.invoke.segments_of`` takes. ``method`` may be empty
    where nobody knows it any more.
    """

    method: str
    type: SandboxMethodType
    text: str = ""
    segments: Any = None
    call_id: str | None = None


@dataclass(frozen=True, kw_only=True)
class TurnRound:
    """An earlier round of the same turn.

    ``asked_at`` is when its prompt was made (``RoundOutcome.asked_at``): messages of the chat
    up to then belong before its answer, later ones after it.
    """

    number: int
    asked_at: datetime
    answer: str
    stop_type: StopType
    reason: str = ""
    output: str = ""
    observations: tuple[Observation, ...] = ()


@dataclass(frozen=True, kw_only=True)
class MethodBrief:
    """One method in the catalogue that the model reads.

    ``name`` is what code writes to call it; ``signature`` is the plugin's own without the
    context parameter, for example ``(city: str, days: int = 3) -> str``; ``doc`` is the
    docstring as the plugin wrote it.
    """

    name: str
    signature: str
    doc: str | None
    type: SandboxMethodType


@dataclass(frozen=True, kw_only=True)
class PluginBrief:
    """One plugin in the catalogue.

    ``inject`` returns the text that the plugin adds to every prompt, None when it has no such
    method; the plugin's context is bound already. ``adapters`` names the platforms that the
    plugin supports; empty means all.
    """

    key: str
    name: str
    module_name: str
    methods: Sequence[MethodBrief]
    inject: Callable[[], Awaitable[str]] | None = None
    adapters: frozenset[str] = field(default_factory=frozenset)
    always_awake: bool = True


@dataclass(frozen=True, kw_only=True)
class InjectedPrompt:
    """What one plugin's inject method returned, or why it returned nothing."""

    plugin: str
    text: str = ""
    error: str | None = None
