"""Decisions of people in a chat: ``/approvals``, ``/approve NUMBER [SCOPE]``, ``/deny NUMBER [REASON]``.

An id, or its beginning, serves as well as a number. The name of a method does not: the call that it names may
have been decided, and another one requested, since the person read it.

Only a message that an adapter or the API received from a person comes here. What the agent, a plugin, a file
or sandboxed code writes into a chat is no such message.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

from broker_config.settings import ApprovalSettings
from nekro.app.approvals.decisions import ApprovalDecisions
from nekro.app.approvals.shown import call_line, difference, shown_call
from nekro_agent.errors import NekroError, NotFoundError, StorageUnavailableError, UsageError
from storage.accounts.approvals import Approval
from storage.engine import Database
from storage.states import ApprovalScope, ApprovalState

__all__ = ["ChatDecisions"]

_COMMANDS: Final = ("/approvals", "/approve", "/deny")
_SCOPES: Final = tuple(scope.value for scope in ApprovalScope)
#: Pending calls that one answer lists.
_MOST_LISTED: Final = 20


class ChatDecisions:
    """Answers the lines of people who may decide on calls."""

    def __init__(
        self, database: Database, settings: ApprovalSettings, decisions: Callable[[], ApprovalDecisions]
    ) -> None:
        """Create it.

        Args:
            decisions: called at the first line that needs it.
        """
        self._database = database
        self._settings = settings
        self._decisions = decisions

    async def answer(self, line: str, *, chat_key: str, issuer: str, user_id: str) -> str | None:
        """Carry out a line of a person; returns the answer, None if it is none of the commands.

        Without people who may decide in chats there are no such commands.

        Args:
            issuer: what vouches for the person's id.

        Raises:
            StorageUnavailableError: the database does not answer.
        """
        name, *words = line.split() or [""]
        if not self._settings.approvers or name not in _COMMANDS:
            return None
        if not self._settings.may_decide(issuer, user_id):
            return "You may not decide on calls of this chat."
        by = f"chat:{issuer}:{user_id}"
        try:
            if name == "/approvals":
                return await self._shown(chat_key, words)
            if name == "/approve":
                return await self._approve(chat_key, words, by)
            return await self._deny(chat_key, words, by)
        except StorageUnavailableError:
            raise
        except NekroError as exc:
            return f"Not done: {exc}"

    async def _shown(self, chat_key: str, words: list[str]) -> str:
        if words:
            row = await self._find(chat_key, words[0])
            parts = (
                f"{row.number}: {row.state.value}",
                shown_call(row.method, row.arguments),
                difference(row),
            )
            return "\n".join(part for part in parts if part)
        return _listed(await self._pending(chat_key)) or "No call waits for approval here."

    async def _approve(self, chat_key: str, words: list[str], by: str) -> str:
        if len(words) not in (1, 2) or (words[1:] and words[1] not in _SCOPES):
            raise UsageError("write /approve NUMBER, or /approve NUMBER once, turn or chat")
        row = await self._find(chat_key, words[0])
        scope = ApprovalScope(words[1]) if words[1:] else ApprovalScope.ONCE
        await self._decisions().approve(row.id, by=by, scope=scope)
        return f"Approved: {call_line(row.method, row.arguments)} runs ({row.number})."

    async def _deny(self, chat_key: str, words: list[str], by: str) -> str:
        if not words:
            raise UsageError("write /deny NUMBER, or /deny NUMBER REASON")
        row = await self._find(chat_key, words[0])
        await self._decisions().deny(row.id, by=by, reason=" ".join(words[1:]) or None)
        return f"Denied: {call_line(row.method, row.arguments)} does not run ({row.number})."

    async def _find(self, chat_key: str, name: str) -> Approval:
        """Return the request of this chat that a text names; other chats decide on their own."""
        async with self._database.read() as transaction:
            near = await transaction.approvals.newest(name=name, chat_key=chat_key, limit=2)
        if not near:
            waiting = [row for row in await self._pending(chat_key) if name in row.method.split(".")]
            if waiting:
                raise UsageError(f"write the number of the call:\n{_listed(waiting)}")
            raise NotFoundError(f"no call of this chat has an approval {name}")
        if len(near) > 1:
            raise UsageError(f"several approvals begin with {name}; write more of the id")
        return near[0]

    async def _pending(self, chat_key: str) -> list[Approval]:
        async with self._database.read() as transaction:
            return await transaction.approvals.newest(
                limit=_MOST_LISTED, chat_key=chat_key, state=ApprovalState.PENDING
            )


def _listed(rows: Iterable[Approval]) -> str:
    return "\n".join(f"{row.number} {call_line(row.method, row.arguments)}" for row in rows)
