"""On whose behalf an MCP request acts: identity, chat and user."""

from __future__ import annotations

import re
from dataclasses import dataclass
from http import HTTPStatus
from typing import Final

from fastapi import Request

from nekro.gateway.identity import Identity, Scope
from nekro.gateway.problems import ProblemError

__all__ = ["Caller", "caller_of"]

_WILDCARD: Final = re.compile(r"[*?\[]")
#: Any of these gives a key access.
_SCOPES: Final = frozenset({Scope.CALL, Scope.RUN, Scope.READ, Scope.ADMIN})


@dataclass(frozen=True, kw_only=True)
class Caller:
    """Who makes a request, and for which chat."""

    identity: Identity
    #: Chat in which methods and code run.
    chat_key: str
    user_id: str | None
    #: Id of the HTTP request, for audit rows; None on stdio.
    request_id: str | None = None
    #: Session id of the handshake versions; None without one.
    session: str | None = None

    def may(self, scope: Scope) -> bool:
        """Whether the key has a scope, and the chat."""
        return scope in self.identity.scopes and self.identity.has_chat(self.chat_key)


def caller_of(request: Request, identity: Identity) -> Caller:
    """Return the caller of an HTTP request.

    The chat is that of the header ``X-Nekro-Chat`` or of the parameter ``chat_key`` of the URL; else the
    key's only chat; else ``mcp-<id of the key>``, with the fixed beginning of the key's pattern before it.
    The user is that of the key, of the header ``X-Nekro-User`` or of the parameter ``user_id``.

    Raises:
        ProblemError: 403 or 404, the key has no scope for MCP, not the chat, or not the user.
    """
    if not identity.scopes & _SCOPES:
        identity.require(Scope.CALL)
    stated = request.headers.get("x-nekro-chat") or request.query_params.get("chat_key")
    chat_key = (stated or "").strip() or _own_chat(identity)
    if not identity.has_chat(chat_key):
        detail = f"the key has no chat {chat_key!r}; name one of its chats: X-Nekro-Chat or ?chat_key="
        raise ProblemError(HTTPStatus.NOT_FOUND, "not_found", detail)
    user = request.headers.get("x-nekro-user") or request.query_params.get("user_id")
    return Caller(
        identity=identity,
        chat_key=chat_key,
        user_id=identity.user_for(user or None),
        request_id=request.state.request_id,
        session=request.headers.get("mcp-session-id"),
    )


def _own_chat(identity: Identity) -> str:
    wildcard = _WILDCARD.search(identity.chats)
    if wildcard is None:
        return identity.chats
    start = identity.chats[: wildcard.start()]
    return f"{start}mcp-{identity.key_id or 'local'}"
