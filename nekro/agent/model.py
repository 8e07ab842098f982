"""Input and output of a round as plain frozen values, independent of database and broker."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from enum import StrEnum
from typing import Any, Final

from nekro.sandbox.models import StopType
from nekro_agent.methods import SandboxMethodType
from nekro_agent.ports import MessageKind

__all__ = [
    "ChatBrief",
    "HistoryFile",
    "HistoryImage",
    "HistoryMessage",
    "HistorySummary",
    "ImagePart",
    "InjectedPrompt",
    "KeptNames",
    "MethodBrief",
    "Observation",
    "Part",
    "PluginBrief",
    "PromptMessage",
    "PromptRole",
    "TextPart",
    "TurnRound",
    "join_parts",
]


class PromptRole(StrEnum):
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
#: Replaces an image for a model without vision.
_UNSEEN: Final = TextPart(text="[left out: this model sees no images]")


@dataclass(frozen=True, kw_only=True)
class PromptMessage:
    """One message of an LLM request."""

    role: PromptRole
    parts: tuple[Part, ...]

    @property
    def text(self) -> str:
        """The text parts, joined by line feeds."""
        return "\n".join(part.text for part in self.parts if isinstance(part, TextPart))

    @property
    def images(self) -> tuple[ImagePart, ...]:
        """The image parts, in order."""
        return tuple(part for part in self.parts if isinstance(part, ImagePart))

    def without_images(self) -> PromptMessage:
        """Return the message for a model without vision: each image becomes a sentence that says so."""
        if not self.images:
            return self
        parts = (_UNSEEN if isinstance(part, ImagePart) else part for part in self.parts)
        return replace(self, parts=join_parts(parts))

    @classmethod
    def of(cls, role: PromptRole, text: str) -> PromptMessage:
        """Build a message of one text part."""
        return cls(role=role, parts=(TextPart(text=text),))


def join_parts(parts: Iterable[Part]) -> tuple[Part, ...]:
    """Merge adjacent text parts: that is easier to read, and some endpoints accept only one."""
    joined: list[Part] = []
    for part in parts:
        if joined and isinstance(part, TextPart) and isinstance(joined[-1], TextPart):
            joined[-1] = TextPart(text=f"{joined[-1].text}\n{part.text}")
        else:
            joined.append(part)
    return tuple(joined)


@dataclass(frozen=True, kw_only=True)
class ChatBrief:
    """The chat that a round belongs to."""

    chat_key: str
    container_key: str
    adapter_key: str | None = None
    channel_name: str | None = None
    channel_type: str | None = None


@dataclass(frozen=True, kw_only=True)
class HistoryFile:
    """A file of a chat's message.

    ``path`` is its path in the sandbox; ``name`` what people see, empty if it is that of the path.
    ``media_type`` is empty and ``size_bytes`` None if they are not known.
    """

    path: str
    name: str = ""
    media_type: str = ""
    size_bytes: int | None = None


@dataclass(frozen=True, kw_only=True)
class HistoryImage(HistoryFile):
    """A picture of a chat's message; ``part`` shows it, or ``hidden`` says why the prompt only names it."""

    part: Part | None = None
    hidden: str = ""


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
    #: Position in the chat; 0 if it is not known.
    sequence: int = 0
    sender_name: str = ""
    sender_id: str = ""
    attachments: tuple[HistoryFile, ...] = ()
    images: tuple[HistoryImage, ...] = ()
    observation_of: str | None = None
    answer_of: str | None = None


@dataclass(frozen=True, kw_only=True)
class HistorySummary:
    """What a model wrote of the chat's messages up to one of them; as untrusted as these are."""

    text: str
    #: ``HistoryMessage.sequence`` of the newest message that it covers, and when that was sent.
    up_to: int
    newest_at: datetime


@dataclass(frozen=True, kw_only=True)
class KeptNames:
    """Names of the variables that the turn's last program left for its next one, and of others."""

    kept: tuple[str, ...] = ()
    not_kept: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Observation:
    """The result of an AGENT or MULTIMODAL_AGENT call.

    ``text`` is the result of an AGENT method; ``segments`` is that of a MULTIMODAL_AGENT method, as
    ``Envelope.segments`` or in any other form that ``nekro_agent.methods.segments_of`` accepts.
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

    ``asked_at`` is when its prompt was built: messages of the chat up to then belong before its answer, later
    ones after it. ``code`` is the program of the answer; None if the answer was sent to the chat as it was.
    ``methods`` are the methods that the program called. ``is_interrupted`` says that the program's worker
    died, so that nothing is known of its end.
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

    Code calls it by ``name``; ``signature`` is the plugin's own without the
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
    #: A plugin that may sleep stays awake for this many turns, this one included; None: no limit.
    turns_left: int | None = None


@dataclass(frozen=True, kw_only=True)
class InjectedPrompt:
    """What one plugin's inject method returned, or its error."""

    plugin: str
    text: str = ""
    error: str | None = None
