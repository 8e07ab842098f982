"""Stream tickets: the right to read one chat's event stream, or that of changes, for browsers, whose streams
send no key.

A ticket is ``nt_<id of the key>_<expiry>_<signature>``; the signature covers the chat too. Nothing is stored:
every gateway checks the signature, and looks up the key, which gives the rights. A browser that connects
again asks for the same URL, so a ticket can be used again until it expires.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import Final

from broker_config.embedded import resolve_signing_key
from broker_config.settings import Settings
from nekro.wire.seals import TICKET, Seal
from nekro_agent.shared_clock import shared_time

__all__ = ["TICKET_SECONDS", "make_ticket", "opened_ticket"]

#: How long a browser may connect with a ticket; a stream that is open stays open.
TICKET_SECONDS: Final = 600
_TICKET: Final = re.compile(r"nt_([0-9a-f]{16})_([0-9]{10,12})_([0-9a-f]{64})", re.ASCII)


def make_ticket(settings: Settings, *, key_id: str, chat_key: str) -> tuple[str, datetime]:
    """Return a ticket for the stream of a chat, and when it expires.

    Args:
        key_id: the key that gives the right.
        chat_key: "" for the stream of changes.
    """
    expires_at = (shared_time() + timedelta(seconds=TICKET_SECONDS)).replace(microsecond=0)
    end = str(int(expires_at.timestamp()))
    return f"nt_{key_id}_{end}_{_seal(settings).sign([key_id, end, chat_key])}", expires_at


def opened_ticket(settings: Settings, ticket: str, *, chat_key: str) -> str | None:
    """Return the id of a ticket's key, which may be revoked or expired.

    None: the ticket is malformed, expired or for another chat.
    """
    match = _TICKET.fullmatch(ticket)
    if match is None or not _seal(settings).fits([match[1], match[2], chat_key], match[3]):
        return None
    if datetime.fromtimestamp(int(match[2]), UTC) <= shared_time():
        return None
    return match[1]


def _seal(settings: Settings) -> Seal:
    return Seal(resolve_signing_key(settings), purpose=TICKET)
