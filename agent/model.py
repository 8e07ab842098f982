"""Input and output of a round as plain frozen values, independent of database and broker."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any

from nekro_agent.methods import SandboxMethodType
from nekro_agent.ports import MessageKind
from sandbox.models import StopType

__all__ = [
    "ChatBrief",
    "HistoryImage",
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
    """The origin of a prompt's message."""

    #: The host's instructions.
    SYSTEM = "system"
    #: Everything the model reads: chat, observations, notices.
    USER = "user"
    #: The model's earlier answers in this turn.
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
class HistoryImage:
    """A picture of a chat's message.

    ``path`` is its path in the sandbox; ``part`` shows it, None where the prompt only names it.
    """

    path: str
    part: Part | None = None


@dataclass(frozen=True, kw_only=True)
class HistoryMessage:
    """One message of the chat, as the prompt shows it.

    ``observation_of`` is set on the system message that stores a call's result for later turns:
    the id of that call. The turn that the result triggered shows it as an observation instead.
    Messages that a method sent into the chat while it ran do not have it. ``answer_of`` is set on an
    answer in words: the id of its round, whose turn shows it as that round's answer instead.
    """

    message_id: str
    kind: MessageKind
    text: str
    sent_at: datetime
    sender_name: str = ""
    sender_id: str = ""
    attachments: tuple[str, ...] = ()
    images: tuple[HistoryImage, ...] = ()
    observation_of: str | None = None
    answer_of: str | None = None


@dataclass(frozen=True, kw_only=True)
class Observation:
    """The result of an AGENT or MULTIMODAL_AGENT call.

    ``text`` is the result of an AGENT method; ``segments`` is that of a MULTIMODAL_AGENT method, as
    ``Envelope.segments`` or in any other form that ``nekro_agent.execution.invoke.segments_of`` accepts.
    ``method`` may be empty if it is no longer known.
    """

    method: str
    type: SandboxMethodType
    text: str = ""
    segments: Any = None
    call_id: str | None = None


@dataclass(frozen=True, kw_only=True)
class TurnRound:
    """An earlier round of the same turn.

    ``asked_at`` is when its prompt was built (``RoundOutcome.asked_at``): messages of the chat
    up to then belong before its answer, later ones after it. ``code`` is the program of the answer; None if
    the answer was sent to the chat as it was. ``methods`` are the methods that the program called.
    ``is_interrupted`` says that the program's worker died, so that nothing is known of its end.
    """

    number: int
    asked_at: datetime
    answer: str
    stop_type: StopType
    round_id: str = ""
    code: str | None = ""
    methods: tuple[str, ...] = ()
    is_interrupted: bool = False
    reason: str = ""
    output: str = ""
    observations: tuple[Observation, ...] = ()


@dataclass(frozen=True, kw_only=True)
class MethodBrief:
    """One method of the catalogue in the prompt.

    ``name`` is the name by which code calls it; ``signature`` is the plugin's own without the
    context parameter, for example ``(city: str, days: int = 3) -> str``; ``doc`` is the
    plugin's docstring, unchanged.
    """

    name: str
    signature: str
    doc: str | None
    type: SandboxMethodType


@dataclass(frozen=True, kw_only=True)
class PluginBrief:
    """One plugin of the catalogue in the prompt.

    ``inject`` returns the text that the plugin adds to every prompt, None if it has no such
    method; it is already bound to the plugin's context.
    """

    key: str
    name: str
    module_name: str
    methods: Sequence[MethodBrief]
    inject: Callable[[], Awaitable[str]] | None = None
    always_awake: bool = True
    #: What is shown instead of the methods of a plugin that is asleep; None while it is awake.
    asleep: str | None = None
    #: The turns, with this one, in which a plugin that may sleep stays awake; None: no limit.
    turns_left: int | None = None


@dataclass(frozen=True, kw_only=True)
class InjectedPrompt:
    """What one plugin's inject method returned, or its error."""

    plugin: str
    text: str = ""
    error: str | None = None
