"""The value of a finished call, for callers outside of sandboxes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nekro_agent.errors import ArgumentError

if TYPE_CHECKING:
    from nekro.wire.invocation import Envelope

__all__ = ["value_of"]


def value_of(envelope: Envelope, *, max_bytes: int) -> object:
    """Return the method's result: parts, text or the decoded value, depending on the method's type."""
    from nekro.wire.values import decode_value

    if envelope.type.wakes_agent:
        return envelope.segments if envelope.segments is not None else envelope.text
    if envelope.value is None:
        return None
    try:
        return decode_value(envelope.value, max_bytes=max_bytes)
    except ArgumentError as exc:
        # The call succeeded, but only a sandbox may load the class of its value.
        return f"<{len(envelope.value)} bytes; {exc}>"
