"""The signed, versioned messages of calls and their results.

A call's message contains one ``Invocation`` and its signature; its result contains one
``Envelope``. Both are JSON. Neither is ever unpickled on the host: ``Invocation.args`` and
``Envelope.value`` are tagged text (``nekro.wire``), which ``nekro.wire.values`` decodes.

Workers of two versions share a broker while a fleet is upgraded. An optional field is added with a
default: older readers ignore unknown fields (the signature covers the message as it was sent), newer
readers use the default for a missing field. A message that an older reader would misunderstand needs
a new version, introduced in two releases: the first one reads the new version and still writes the
old one, the second one writes the new version.
"""

from __future__ import annotations

import hmac
import json
from datetime import datetime
from os import urandom
from typing import Any, Final, Self

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, SecretBytes, ValidationError

from nekro.base.release import release
from nekro.wire import plain_json
from nekro_agent.errors import MessageRefusedError
from nekro_agent.methods import SandboxMethodType
from nekro_agent.shared_clock import shared_now

__all__ = [
    "READABLE_VERSIONS",
    "WIRE_VERSION",
    "Envelope",
    "Invocation",
    "Signer",
    "is_long_body",
    "new_id",
    "refuse_version",
    "tool_answer",
]

#: The version that this code writes.
WIRE_VERSION: Final = 2
#: The versions that this code reads.
READABLE_VERSIONS: Final = range(2, 3)
#: JSON types that every encoder writes in the same way.
_PLAIN: Final = frozenset((str, int, bool, type(None)))
_DELETE: Final = b"\x7f"
#: Up to this length, hashing takes less time than a switch to a thread.
_LONG_CHARS: Final = 128 << 10
#: Replaces the set of given field names; shared, because a frozen model never changes it.
_NONE_GIVEN: Final[set[str]] = set()


def new_id() -> str:
    """Return a fresh id for a call, round, message or job: 32 hexadecimal digits."""
    return urandom(16).hex()


def is_long_body(body: object) -> bool:
    """Whether a message's arguments are so long that its signature must be checked off the event loop.

    Args:
        body: as received, not verified.
    """
    invocation = body.get("invocation") if isinstance(body, dict) else None
    args = invocation.get("args") if isinstance(invocation, dict) else None
    return isinstance(args, str) and len(args) > _LONG_CHARS


def refuse_version(message: object, *, what: str) -> None:
    """Refuse a message of a version that this code does not read.

    Args:
        message: as received, not parsed yet.
        what: name of the message in the error.

    Raises:
        MessageRefusedError: the version is older or newer; the message says which side to upgrade.
    """
    version = message.get("version") if isinstance(message, dict) else None
    # ``type`` instead of isinstance, because True equals 1.
    if type(version) is int and version in READABLE_VERSIONS:
        return
    oldest, newest = READABLE_VERSIONS[0], READABLE_VERSIONS[-1]
    is_newer = type(version) is int and version > newest
    fix = "upgrade this worker or command" if is_newer else "upgrade its sender"
    spoken = str(oldest) if oldest == newest else f"{oldest} to {newest}"
    raise MessageRefusedError(
        f"{what} refused: version {version!r}, nekro-workers {release()} supports {spoken}; {fix}"
    )


class _Wire(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class Invocation(_Wire):
    """One call of one plugin method, with the identity that the host (never the sandbox) assigned."""

    version: int = Field(WIRE_VERSION, ge=READABLE_VERSIONS[0], le=READABLE_VERSIONS[-1])
    call_id: str = Field(min_length=1, max_length=64)
    method: str = Field(description="Task name `author.module.function`.")
    chat_key: str
    container_key: str = Field(description="Names the sandbox's shared area; opaque to plugins.")
    user_id: str | None = Field(
        None, description="Platform id of the user that triggered the turn; None if no user did."
    )
    adapter_key: str | None = None
    channel_id: str | None = None
    channel_name: str | None = None
    channel_type: str | None = None
    round_id: str | None = Field(
        None, description="Round whose code makes the call; None outside rounds (CLI)."
    )
    turn_id: str | None = Field(None, description="Turn that the round belongs to; follow-up rounds join it.")
    round_number: int = Field(0, description="Position of that round in its turn, from 1; 0 outside rounds.")
    wakes_agent: bool = Field(True, description="Whether an AGENT result schedules a follow-up round.")
    issued_at: AwareDatetime = Field(description="By the fleet's shared time, like the other times.")
    deadline: AwareDatetime
    repeatable: bool = Field(
        False, description="Whether it may run again when its worker died while running it."
    )
    waits_until: AwareDatetime | None = Field(
        None,
        description="When its caller stops waiting and the call becomes a job; None means at the deadline.",
    )
    approval_id: str | None = Field(
        None, description="The approval that sent it; None for a call that its caller sent."
    )
    is_recorded: bool = Field(
        False, description="Whether its caller recorded it, so that the worker claims it for any method."
    )
    account_id: str | None = Field(
        None,
        description="The run or call for which a key of the API may pay; None in rounds, whose turn it is.",
    )
    args: str = Field(description="The arguments as tagged text, as the caller wrote it.")

    def waited_seconds_left(self) -> float:
        """Seconds until the caller stops waiting; negative when it may have stopped."""
        end = self.deadline if self.waits_until is None else self.waits_until
        return end.timestamp() - shared_now()

    def remaining_seconds(self) -> float:
        """Seconds until the deadline; negative when it has passed."""
        return self.deadline.timestamp() - shared_now()


class Envelope(_Wire):
    """The result of a method, as sent to the caller."""

    version: int = Field(WIRE_VERSION, ge=READABLE_VERSIONS[0], le=READABLE_VERSIONS[-1])
    call_id: str
    type: SandboxMethodType
    value: str | None = Field(None, description="The value as tagged text, for TOOL and BEHAVIOR.")
    text: str | None = Field(None, description="Text of an AGENT or BEHAVIOR result.")
    segments: list[dict[str, Any]] | None = Field(
        None, description="Content parts of a MULTIMODAL_AGENT result."
    )
    round_id: str | None = Field(None, description="Follow-up round that was scheduled; None if none was.")
    worker: str = Field("", description="Worker that ran the method.")
    started_at: AwareDatetime
    finished_at: AwareDatetime

    @classmethod
    def of(cls, *, value: bytes | None, **fields: Any) -> Self:
        """Build an envelope; ``value`` is tagged text, None when the type has none."""
        return cls(value=None if value is None else value.decode(), **fields)

    def value_bytes(self) -> bytes:
        """Return the tagged text of the value; ``b""`` when there is none."""
        return self.value.encode() if self.value else b""


def tool_answer(
    *, call_id: str, value: bytes, worker: str, started_at: datetime, finished_at: datetime
) -> dict[str, Any]:
    """Return the JSON data of a TOOL's envelope without building the model, as most calls are TOOL calls."""
    return {
        "version": WIRE_VERSION,
        "call_id": call_id,
        "type": SandboxMethodType.TOOL.value,
        "value": value.decode(),
        "text": None,
        "segments": None,
        "round_id": None,
        "worker": worker,
        "started_at": _written(started_at),
        "finished_at": _written(finished_at),
    }


def _written(moment: datetime) -> str:
    """Return a time in pydantic's format."""
    text = moment.isoformat()
    return f"{text[:-6]}Z" if text.endswith("+00:00") else text


def _canonical(payload: dict[str, Any]) -> bytes:
    """Return the bytes that are signed: JSON with sorted keys, without whitespace, in ASCII."""
    if _PLAIN.issuperset(map(type, payload.values())):
        quick = plain_json.dump(dict(sorted(payload.items())))
        # ``plain_json`` does not escape non-ASCII characters and DEL as ``json`` does.
        if quick.isascii() and _DELETE not in quick:
            return quick
    return json.dumps(payload, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()


class Signer:
    """Signs invocations with HMAC-SHA256 over their canonical JSON (sorted keys, no spaces)."""

    def __init__(self, key: SecretBytes) -> None:
        #: HMAC state after the key and before any message; copied for each message.
        self._keyed = hmac.new(key.get_secret_value(), digestmod="sha256")

    def sign(self, invocation: Invocation) -> dict[str, Any]:
        """Return the message body: ``{"invocation": {…}, "signature": hex}``."""
        payload = invocation.model_dump(mode="json")
        return {"invocation": payload, "signature": self._digest(payload)}

    def verify(self, body: object, *, task_name: str | None = None) -> Invocation:
        """Check a message body and return its invocation.

        Args:
            task_name: task that carried the body; None skips that check.

        Raises:
            MessageRefusedError: the body is malformed, unsigned, altered, signed with another
                key, of another version, or was signed for another task. Expiry is not checked
                here, because the caller needs the id of an expired call.
        """
        if not isinstance(body, dict):
            raise MessageRefusedError("message refused: no body")
        payload, signature = body.get("invocation"), body.get("signature")
        if not isinstance(payload, dict) or not isinstance(signature, str):
            raise MessageRefusedError("message refused: invocation or signature is missing")
        # compare_digest raises for strings that are not ASCII.
        if not signature.isascii() or not hmac.compare_digest(self._digest(payload), signature):
            raise MessageRefusedError(
                "message refused: its signature does not match (was NEKRO_SECURITY__SIGNING_KEY changed?)"
            )
        invocation = self._parse(payload)
        if task_name is not None and invocation.method != task_name:
            raise MessageRefusedError(f"message refused: signed for {invocation.method}, sent to {task_name}")
        return invocation

    def _digest(self, payload: dict[str, Any]) -> str:
        digest = self._keyed.copy()
        digest.update(_canonical(payload))
        return digest.hexdigest()

    @staticmethod
    def _parse(payload: dict[str, Any]) -> Invocation:
        refuse_version(payload, what="message")
        try:
            invocation = Invocation.model_validate(payload)
        except ValidationError as exc:
            fields = ", ".join(
                ".".join(map(str, e["loc"])) for e in exc.errors(include_input=False, include_url=False)
            )
            raise MessageRefusedError(f"message refused: malformed fields {fields}") from exc
        # The set of given fields takes 2 KiB per call and is never used.
        object.__setattr__(invocation, "__pydantic_fields_set__", _NONE_GIVEN)
        return invocation

    @classmethod
    def from_text(cls, key: str) -> Self:
        """Build a signer from a key in text form."""
        return cls(SecretBytes(key.encode()))
