"""On whose behalf an operation runs, what it may do, and the record of its administrative acts."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from enum import StrEnum
from fnmatch import fnmatchcase
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar

from pydantic import BaseModel

from nekro.wire.invocation import new_id
from storage.accounts.key_rights import KeyRights
from storage.states import account_of_key

if TYPE_CHECKING:
    from nekro.app.services import Services
    from storage.transaction import Transaction

__all__ = [
    "LOCAL",
    "Actor",
    "Identity",
    "Once",
    "RefusedError",
    "Scope",
    "key_reused",
]

M = TypeVar("M", bound=BaseModel)


class RefusedError(Exception):
    """An operation refuses to run; for errors that only the API has."""

    def __init__(
        self, status: HTTPStatus, code: str, detail: str, *, headers: dict[str, str] | None = None
    ) -> None:
        """Create it.

        Args:
            code: stable name of the problem.
            detail: text that says what to do.
            headers: of the HTTP answer.
        """
        super().__init__(detail)
        self.status, self.code, self.detail, self.headers = status, code, detail, headers or {}


def key_reused() -> RefusedError:
    """Return the error of a request that has the idempotency key of another one."""
    return RefusedError(
        HTTPStatus.UNPROCESSABLE_ENTITY,
        "idempotency_key_reused",
        "this Idempotency-Key was used with another body; use a new one for a new request",
    )


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
class Identity(KeyRights):
    """The holder of a key."""

    #: Id of the key's row; None: the local key, or a process of this machine's user (`nekro mcp serve`).
    key_id: str | None
    scopes: frozenset[Scope]
    #: Id of the key of a request over HTTP, also of the local one: tickets name it.
    credential_id: str = ""
    #: Name in records of decisions; None: that of the key.
    stated_name: str | None = None

    @property
    def name(self) -> str:
        """Who acts, in records of decisions."""
        if self.stated_name is not None:
            return self.stated_name
        return "gateway" if self.key_id is None else f"key:{self.key_id}"

    @property
    def account_id(self) -> str | None:
        """The account of what the key causes (``nekro_agent.execution.current``); None: nobody pays for
        it."""
        if self.key_id is None:
            return None
        return account_of_key(self.key_id)

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
            RefusedError: 403 or 404.
        """
        if scope not in self.scopes:
            raise RefusedError(
                HTTPStatus.FORBIDDEN, "scope_missing", f"the key lacks the scope {scope.value!r}"
            )
        if chat_key is not None and not self.has_chat(chat_key):
            raise RefusedError(HTTPStatus.NOT_FOUND, "not_found", f"there is no chat {chat_key!r}")

    def require_all(self, scope: Scope) -> None:
        """Return if the key has the scope for every chat and every user.

        Raises:
            RefusedError: 403.
        """
        self.require(scope)
        if not self.is_of_all_chats or self.user_id is not None:
            raise RefusedError(
                HTTPStatus.FORBIDDEN, "key_restricted", "this needs a key for all chats and all users"
            )

    def require_list(self, scope: Scope, *, chat_key: str | None) -> None:
        """Return if the key may list things of a chat, or of all chats if it is None.

        Raises:
            RefusedError: 403 or 404.
        """
        self.require(scope, chat_key=chat_key)
        if chat_key is None and not self.is_of_all_chats:
            raise RefusedError(
                HTTPStatus.FORBIDDEN,
                "key_restricted",
                f"the key has the chats {self.chats!r}; name one: ?chat_key=",
            )

    def user_for(self, stated: str | None) -> str | None:
        """Return the user of a request.

        Args:
            stated: the user that the request names; None if it names none.

        Raises:
            RefusedError: 403, the key acts for another user.
        """
        if self.user_id is None or stated in (None, self.user_id):
            return self.user_id or stated
        raise RefusedError(
            HTTPStatus.FORBIDDEN, "user_not_allowed", f"the key acts for user {self.user_id!r} only"
        )


#: Who has the rights of the gateway's own user: the holder of the local key.
LOCAL: Final = Identity(key_id=None, scopes=frozenset(Scope))


class Once(Protocol):
    """Runs the work of one request once, also if the request is repeated.

    An operation checks what the actor may do before it runs its work: a repetition gets the answer of the
    first execution, and must not get it without the right to it.
    """

    #: Names the effect, for deduplication keys; None: the request is not repeated.
    name: str | None
    #: Whether an earlier execution may have had its effect; known when the work runs.
    is_repetition: bool

    @property
    def id(self) -> str:
        """An id for what the work creates: the same in each execution of the request, else a new one."""
        ...

    async def run(self, kind: type[M], work: Callable[[], Awaitable[M]], *, is_repeatable: bool = True) -> M:
        """Return the answer of ``work``, or that of the execution before.

        Args:
            kind: model of the answer.
            is_repeatable: whether a second execution of ``work`` has no second effect, for example because
                it uses ``id``.
        """
        ...


class _Unrepeated:
    """A request without an idempotency key."""

    name: str | None = None
    is_repetition: bool = False

    @property
    def id(self) -> str:
        return new_id()

    async def run(self, kind: type[M], work: Callable[[], Awaitable[M]], *, is_repeatable: bool = True) -> M:
        return await work()


@dataclass(frozen=True, kw_only=True)
class Actor:
    """Who asks for an operation, and the services of the process that runs it."""

    services: Services
    identity: Identity
    #: Id of the HTTP request, for audit rows; None: there is none.
    request_id: str | None = None
    once: Once = field(default_factory=_Unrepeated)

    async def record(
        self, transaction: Transaction, action: str, subject: str, data: dict[str, Any] | None = None
    ) -> None:
        """Record an act in the transaction of the act, or before an act that has none.

        Args:
            data: what was asked for; no secrets.
        """
        await transaction.audit.add(
            action, subject, key_id=self.identity.key_id, request_id=self.request_id, data=data
        )
