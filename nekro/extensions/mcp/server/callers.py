"""On whose behalf an MCP request acts: identity, chat and user, and the id of its session.

Session ids of the handshake versions can be checked by any gateway: nothing is stored. An id is random, with
a code that only processes of the fleet can compute, bound to the key that began the session. Its only use is
to name requests: a client cancels a request by its number within the session.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from dataclasses import dataclass
from http import HTTPStatus
from typing import Final

from fastapi import Request

from nekro.app.services import Services
from nekro.operations.actor import Actor, Identity, RefusedError, Scope

__all__ = [
    "Caller",
    "Sessions",
    "caller_of",
]


#: Any of these gives a key access.
_SCOPES: Final = frozenset({Scope.CALL, Scope.RUN, Scope.READ, Scope.ADMIN})


@dataclass(frozen=True, kw_only=True)
class Caller:
    """The caller of a request, and the chat that it is for."""

    #: As operations know it.
    actor: Actor
    #: Chat in which methods and code run.
    chat_key: str
    user_id: str | None
    #: Session id of the handshake versions; None without one.
    session: str | None = None

    def may(self, scope: Scope) -> bool:
        """Whether the key has a scope, and the chat."""
        return scope in self.identity.scopes and self.identity.has_chat(self.chat_key)

    @property
    def identity(self) -> Identity:
        """The holder of its key."""
        return self.actor.identity


def caller_of(services: Services, request: Request, identity: Identity) -> Caller:
    """Return the caller of an HTTP request.

    The chat is that of the header ``X-Nekro-Chat`` or of the parameter ``chat_key`` of the URL; else the
    key's only chat; else ``mcp-<id of the key>``, with the fixed beginning of the key's pattern before it.
    The user is that of the key, of the header ``X-Nekro-User`` or of the parameter ``user_id``.

    Raises:
        RefusedError: 403 or 404, the key has no scope for MCP, not the chat, or not the user.
    """
    if not identity.scopes & _SCOPES:
        identity.require(Scope.CALL)
    stated = request.headers.get("x-nekro-chat") or request.query_params.get("chat_key")
    chat_key = (stated or "").strip() or _own_chat(identity)
    if not identity.has_chat(chat_key):
        detail = f"the key has no chat {chat_key!r}; name one of its chats: X-Nekro-Chat or ?chat_key="
        raise RefusedError(HTTPStatus.NOT_FOUND, "not_found", detail)
    user = request.headers.get("x-nekro-user") or request.query_params.get("user_id")
    return Caller(
        actor=Actor(services=services, identity=identity, request_id=request.state.request_id),
        chat_key=chat_key,
        user_id=identity.user_for(user or None),
        session=request.headers.get("mcp-session-id"),
    )


def _own_chat(identity: Identity) -> str:
    start = identity.chat_prefix
    return start if start == identity.chats else f"{start}mcp-{identity.key_id or 'local'}"


_ID: Final = re.compile(r"([0-9a-f]{32})([0-9a-f]{64})")


class Sessions:
    """Makes and checks session ids."""

    def __init__(self, key: str) -> None:
        """
        Args:
            key: secret that all processes of the fleet share.
        """
        self._key = hashlib.sha256(b"nekro mcp sessions\0" + key.encode()).digest()

    def new(self, identity: Identity) -> str:
        """Return the id of a new session."""
        nonce = secrets.token_hex(16)
        return nonce + self._code(nonce, identity)

    def is_valid(self, session: str, identity: Identity) -> bool:
        """Whether a session was begun with the same key."""
        match = _ID.fullmatch(session)
        return match is not None and hmac.compare_digest(match[2], self._code(match[1], identity))

    def _code(self, nonce: str, identity: Identity) -> str:
        text = f"{nonce}\0{identity.key_id or ''}".encode()
        return hmac.new(self._key, text, hashlib.sha256).hexdigest()
