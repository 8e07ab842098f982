"""What a protocol of model endpoints consists of, and what protocols share."""

from __future__ import annotations

import base64
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from nekro.agent.llm.attempt import Gathered
from nekro.agent.model import Part, PromptMessage, PromptRole, TextPart, join_parts
from nekro.agent.multimodal import image_data

__all__ = [
    "MAX_TOKENS",
    "SYSTEM",
    "TEMPERATURE",
    "ChatProtocol",
    "Options",
    "RoleMessages",
    "encoded_image",
    "refused",
    "sendable",
    "turns",
]

#: Names of quirks: what endpoints refuse, and what is left out or sent in another way from then on.
TEMPERATURE: Final = "temperature"
MAX_TOKENS: Final = "max_tokens"
SYSTEM: Final = "system"

#: How endpoints say that they do not take a parameter.
_REFUSES_TEMPERATURE: Final = re.compile(
    rb"temperature.{0,200}(?:support|only|deprecated|not (?:permitted|allowed))"
    rb"|(?:support|only|deprecated|unknown|unrecognized).{0,80}temperature",
    re.IGNORECASE | re.DOTALL,
)
_REFUSES_SYSTEM: Final = re.compile(
    rb"(?:system (?:role|message|prompt|instruction)|developer instruction).{0,40}"
    rb"not (?:support|enabled|allowed)",
    re.IGNORECASE,
)
#: Stands for a message of people where a protocol demands one.
_NO_MESSAGE: Final = "(no message)"


@dataclass(frozen=True, kw_only=True)
class Options:
    """What requests to an endpoint ask for besides their messages; all of it is from the settings."""

    model: str
    stream: bool = True
    temperature: float | None = None
    max_tokens: int | None = None
    #: Further values of requests.
    parameters: Mapping[str, Any] = field(default_factory=dict)


class ChatProtocol(Protocol):
    """How one kind of endpoint is asked and answers; an instance has no state."""

    @property
    def name(self) -> str:
        """As in the settings."""
        ...

    @property
    def provider(self) -> str:
        """Name of a provider whose host is not known, in OpenTelemetry's conventions."""
        ...

    @property
    def path(self) -> str:
        """What follows the base URL, for people."""
        ...

    def url(self, base_url: str, options: Options) -> str:
        """Return the address of requests; the query of the base URL stays."""
        ...

    def models_url(self, base_url: str) -> str:
        """Return the address of the list of models."""
        ...

    def headers(self, key: str) -> dict[str, str]:
        """Return the headers of requests; the ones with the key are sent to the endpoint's own host only."""
        ...

    def body(
        self, messages: Iterable[PromptMessage], options: Options, quirks: Collection[str]
    ) -> dict[str, Any]:
        """Return the JSON of a request without what the endpoint has refused."""
        ...

    def quirk_of(self, refusal: bytes, body: Mapping[str, Any]) -> str | None:
        """Return what of a request a 4xx refuses; None if it is none of the known quirks."""
        ...

    def read_event(self, event: dict[str, Any], gathered: Gathered) -> bool:
        """Read an event of a stream; return whether it has text, reasoning, a call or an end."""
        ...

    def read_whole(self, body: object, gathered: Gathered) -> None:
        """Read an answer that came as one JSON value, and set ``finish_reason``."""
        ...


@dataclass(frozen=True, kw_only=True)
class RoleMessages:
    """Messages of one role in a row."""

    role: PromptRole
    parts: tuple[Part, ...]


def turns(messages: Iterable[PromptMessage], *, keep_system: bool) -> tuple[str, list[RoleMessages]]:
    """Return the system's text and the turns: roles alternate, people begin, and no text is blank.

    System messages behind another one are messages of people.

    Args:
        keep_system: False puts the system's text before the first message of people.
    """
    system: list[str] = []
    found: list[RoleMessages] = []
    for message in messages:
        parts = tuple(part for part in message.parts if not isinstance(part, TextPart) or part.text.strip())
        if message.role is PromptRole.SYSTEM and not found and keep_system:
            system += [part.text for part in parts if isinstance(part, TextPart)]
            continue
        role = PromptRole.ASSISTANT if message.role is PromptRole.ASSISTANT else PromptRole.USER
        if found and found[-1].role is role:
            found[-1] = RoleMessages(role=role, parts=join_parts((*found[-1].parts, *parts)))
        elif parts:
            found.append(RoleMessages(role=role, parts=parts))
    if not found or found[0].role is not PromptRole.USER:
        found.insert(0, RoleMessages(role=PromptRole.USER, parts=(TextPart(text=_NO_MESSAGE),)))
    return sendable("\n".join(system)), found


def refused(refusal: bytes, *, has_temperature: bool) -> str | None:
    """Return the quirk that every protocol can have."""
    if _REFUSES_SYSTEM.search(refusal):
        return SYSTEM
    return TEMPERATURE if has_temperature and _REFUSES_TEMPERATURE.search(refusal) else None


def encoded_image(url: str) -> tuple[str, str] | None:
    """Return (media type, Base64) of a data URL; None for another URL."""
    found = image_data(url)
    return None if found is None else (found[0], base64.b64encode(found[1]).decode("ascii"))


def sendable(text: str) -> str:
    """Replace lone surrogates, which a model's earlier answer may contain and UTF-8 cannot encode."""
    return text.encode("utf-8", "replace").decode("utf-8")
