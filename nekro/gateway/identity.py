"""On whose behalf a request acts, what it may do, and the record of its administrative acts."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from fnmatch import fnmatchcase
from http import HTTPStatus
from typing import Any, Final

from fastapi import Request

from nekro.gateway.problems import ProblemError
from storage.accounts.keys import AuditRepository, account_of_key

__all__ = [
    "LOCAL",
    "Identity",
    "Scope",
    "record_act",
]


class Scope(StrEnum):
    """What a key may do."""

    #: Read messages, events, turns, files.
    READ = "read"
    #: Post messages and files, cancel turns.
    POST = "post"
    #: Call methods.
    CALL = "call"
    #: Run code in sandboxes.
    RUN = "run"
    #: Decide on calls that wait for approval; calls of the key itself count as approved.
    APPROVE = "approve"
    #: Everything else: plugins, configuration, jobs, timers, dead letters, keys.
    ADMIN = "admin"


@dataclass(frozen=True, kw_only=True)
class Identity:
    """The holder of a key."""

    #: Id of the key's row; None: the local key, or a process of this machine's user (`nekro mcp serve`).
    key_id: str | None
    scopes: frozenset[Scope]
    #: Pattern of the chat keys, as of ``fnmatch``.
    chats: str = "*"
    #: The person in whose name messages and calls are made; None: each request says it.
    user_id: str | None = None
    #: None: as the settings say; 0: no limit.
    requests_per_minute: int | None = None
    #: Limits per day (UTC) of the turns that it starts; None: no limit.
    cost_per_day: float | None = None
    tokens_per_day: int | None = None
    #: Most bytes that it may keep stored; None: as the settings say; 0: no limit.
    stored_bytes_limit: int | None = None
    #: None: never.
    expires_at: datetime | None = None
    #: Id of the key of a request over HTTP, also of the local one: tickets name it.
    credential_id: str = ""

    @property
    def name(self) -> str:
        """Who acts, in records of decisions."""
        return "gateway" if self.key_id is None else f"key:{self.key_id}"

    @property
    def account_id(self) -> str | None:
        """The account of what the key causes (``nekro_agent.execution.current``); None: nobody pays for
        it."""
        return None if self.key_id is None else account_of_key(self.key_id)

    @property
    def is_of_all_chats(self) -> bool:
        """Whether the key has every chat."""
        return self.chats == "*"

    @property
    def chat_prefix(self) -> str:
        """What the keys of all its chats begin with: its pattern before the first wildcard."""
        return re.split(r"[*?\[]", self.chats, maxsplit=1)[0]

    def has_chat(self, chat_key: str) -> bool:
        """Whether the key has a chat."""
        return fnmatchcase(chat_key, self.chats)

    def require(self, scope: Scope, *, chat_key: str | None = None) -> None:
        """Return if the key has the scope, and the chat if one is named.

        A chat that the key does not have is reported like one that does not exist, so keys reveal no chats.

        Raises:
            ProblemError: 403 or 404.
        """
        if scope not in self.scopes:
            raise ProblemError(
                HTTPStatus.FORBIDDEN, "scope_missing", f"the key lacks the scope {scope.value!r}"
            )
        if chat_key is not None and not self.has_chat(chat_key):
            raise ProblemError(HTTPStatus.NOT_FOUND, "not_found", f"there is no chat {chat_key!r}")

    def require_all(self, scope: Scope) -> None:
        """Return if the key has the scope for every chat and every user.

        Raises:
            ProblemError: 403.
        """
        self.require(scope)
        if not self.is_of_all_chats or self.user_id is not None:
            raise ProblemError(
                HTTPStatus.FORBIDDEN, "key_restricted", "this needs a key for all chats and all users"
            )

    def require_list(self, scope: Scope, *, chat_key: str | None) -> None:
        """Return if the key may list things of a chat, or of all chats if it is None.

        Raises:
            ProblemError: 403 or 404.
        """
        self.require(scope, chat_key=chat_key)
        if chat_key is None and not self.is_of_all_chats:
            raise ProblemError(
                HTTPStatus.FORBIDDEN,
                "key_restricted",
                f"the key has the chats {self.chats!r}; name one: ?chat_key=",
            )

    def user_for(self, stated: str | None) -> str | None:
        """Return the user of a request.

        Args:
            stated: the user that the request names; None if it names none.

        Raises:
            ProblemError: 403, the key acts for another user.
        """
        if self.user_id is None or stated in (None, self.user_id):
            return self.user_id or stated
        raise ProblemError(
            HTTPStatus.FORBIDDEN, "user_not_allowed", f"the key acts for user {self.user_id!r} only"
        )


#: Who has the rights of the gateway's own user: the holder of the local key.
LOCAL: Final = Identity(key_id=None, scopes=frozenset(Scope))


async def record_act(
    audit: AuditRepository,
    request: Request,
    identity: Identity,
    action: str,
    subject: str,
    data: dict[str, Any] | None = None,
) -> None:
    """Record an act in the transaction of the act, or before an act that has none.

    Args:
        data: what was asked for; no secrets.
    """
    await audit.add(action, subject, key_id=identity.key_id, request_id=request.state.request_id, data=data)
