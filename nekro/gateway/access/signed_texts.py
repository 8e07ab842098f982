"""Signed texts in the place of a key: tickets for streams, and codes that log a browser in.

Browsers send no key with a stream. A ticket is the right to read one chat's event stream, or that of changes:
``nt_<id of the key>_<expiry>_<signature>``; the signature covers the chat too. Nothing is stored: every
gateway checks the signature, and looks up the key, which gives the rights. A browser that connects again asks
for the same URL, so a ticket can be used again until it expires.

A code ``nl_<id of the key>_<expiry>_<random>_<signature>`` logs a browser in to the console once. `nekro up`
prints it in the fragment of a link, which browsers send to no server and in no Referer header. Redis
remembers a code that was used until it expires; while Redis does not answer, no code is accepted.
"""

from __future__ import annotations

import re
import secrets
from datetime import UTC, datetime, timedelta
from http import HTTPStatus
from typing import Final

from broker_config.embedded import resolve_signing_key
from broker_config.keys import Keys
from broker_config.redis_library import redis
from broker_config.settings import Settings
from nekro.broker.redis.link import RedisLink
from nekro.operations.actor import RefusedError
from nekro.wire.seals import CONSOLE_LOGIN, TICKET, Seal
from nekro_agent.shared_clock import shared_time

__all__ = [
    "CODE_SECONDS",
    "TICKET_SECONDS",
    "LoginCodes",
    "make_code",
    "make_ticket",
    "opened_ticket",
]


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
    return f"nt_{key_id}_{end}_{_ticket_seal(settings).sign([key_id, end, chat_key])}", expires_at


def opened_ticket(settings: Settings, ticket: str, *, chat_key: str) -> str | None:
    """Return the id of a ticket's key, which may be revoked or expired.

    None: the ticket is malformed, expired or for another chat.
    """
    match = _TICKET.fullmatch(ticket)
    if match is None or not _ticket_seal(settings).fits([match[1], match[2], chat_key], match[3]):
        return None
    if datetime.fromtimestamp(int(match[2]), UTC) <= shared_time():
        return None
    return match[1]


def _ticket_seal(settings: Settings) -> Seal:
    return Seal(resolve_signing_key(settings), purpose=TICKET)


#: How long a person has to open the link.
CODE_SECONDS: Final = 600
#: How much longer a used code is remembered: clocks of gateways may differ.
_MARGIN_SECONDS: Final = 600

_CODE: Final = re.compile(r"nl_([0-9a-f]{16})_([0-9]{10,12})_([0-9a-f]{32})_([0-9a-f]{64})", re.ASCII)


def make_code(settings: Settings, *, key_id: str) -> str:
    """Return a code that gives a session with the rights of a key."""
    end = str(int((shared_time() + timedelta(seconds=CODE_SECONDS)).timestamp()))
    mark = secrets.token_hex(16)
    return f"nl_{key_id}_{end}_{mark}_{_code_seal(settings).sign([key_id, end, mark])}"


class LoginCodes:
    """Accepts each code once; one instance per process."""

    def __init__(self, settings: Settings) -> None:
        """Take ``settings`` with every URL resolved; the first code connects."""
        self._settings = settings
        self._link = RedisLink(settings.broker, settings.results.url or settings.broker.url)
        self._keys = Keys(prefix=settings.broker.key_prefix)

    async def take(self, code: str) -> str | None:
        """Return the id of the key of a code, and use the code up; None if it is not valid.

        Raises:
            RefusedError: 503, Redis does not answer.
        """
        match = _CODE.fullmatch(code)
        if match is None or not _code_seal(self._settings).fits([match[1], match[2], match[3]], match[4]):
            return None
        seconds = (datetime.fromtimestamp(int(match[2]), UTC) - shared_time()).total_seconds()
        if seconds <= 0:
            return None
        try:
            is_first = await self._link.execute(
                "SET", self._keys.login(match[3]), "1", "NX", "EX", int(seconds) + _MARGIN_SECONDS
            )
        except (redis.RedisError, OSError) as exc:
            raise RefusedError(
                HTTPStatus.SERVICE_UNAVAILABLE,
                "broker_unavailable",
                "Redis does not answer, so the link cannot be used now; log in with a key",
            ) from exc
        return match[1] if is_first is not None else None

    async def close(self) -> None:
        """Close the connection."""
        await self._link.close()


def _code_seal(settings: Settings) -> Seal:
    return Seal(resolve_signing_key(settings), purpose=CONSOLE_LOGIN)
