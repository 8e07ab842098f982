"""Chats: their platform data, the lease on their rounds, and what the agent keeps of them.

The agent keeps summaries, variables of open turns, and prompts of rounds. There is one row per version of a
summary, built one upon the other. Variables of programs are kept between the runs of one turn as tagged text,
which only a sandbox reads. Prompts are kept where the operator wants that."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from typing import Any, Final

from sqlalchemy import Executable, Integer, bindparam, delete, func, literal_column, select, update

from nekro_agent.errors import FencedError, NotFoundError
from nekro_agent.layout import channel_of
from nekro_agent.ports import ChatInfo
from storage.driver.statements import FixedStatement
from storage.repositories.base import Repository, found, is_one_of, values_of
from storage.repositories.leases import (
    LeaseTable,
    is_free,
    is_held_by,
    release_values,
    take_values,
)
from storage.sql import insert, now, seconds_parameter
from storage.states import RoundState, new_id
from storage.tables import CHAT_SUMMARIES, CHATS, MESSAGES, ROUND_PROMPTS, ROUNDS, TURN_VARIABLES

__all__ = [
    "CHAT_LEASES",
    "KEPT_VERSIONS",
    "ChatRepository",
    "NewSummary",
    "PromptRepository",
    "Summary",
    "SummaryRepository",
    "TurnVariables",
    "VariableRepository",
    "is_stated",
]


CHAT_LEASES: Final = LeaseTable(
    key=CHATS.c.chat_key, fence=CHATS.c.fence, is_live=CHATS.c.lease_until.is_not(None)
)

_KNOWN = ("adapter_key", "channel_id", "channel_name", "channel_type")


def is_stated(chat: ChatInfo, known: Mapping[str, str | None]) -> bool:
    """Whether a chat has what is known of it; None is not known."""
    return all(value in (None, getattr(chat, name)) for name, value in known.items())


class ChatRepository(Repository):
    """Rows of chats.

    A transaction that adds messages or rounds to a chat, or writes to its rounds, locks the chat's row
    first; therefore the sequence within a chat is the order of commits. To avoid deadlocks, write to a
    call, job or timer before anything of a chat, and to one chat per transaction.
    """

    async def ensure(
        self,
        chat_key: str,
        *,
        seen: ChatInfo | None = None,
        adapter_key: str | None = None,
        channel_id: str | None = None,
        channel_name: str | None = None,
        channel_type: str | None = None,
    ) -> ChatInfo:
        """Return the chat, created with a random container key when it is new.

        A field that is not None replaces the stored value; None keeps it, and a new chat takes what its
        key says (``nekro_agent.layout.channel_of``). Concurrent calls for a
        new chat get the same container key.

        Args:
            seen: the chat as this transaction has read it; None reads it.
        """
        known = {
            "adapter_key": adapter_key,
            "channel_id": channel_id,
            "channel_name": channel_name,
            "channel_type": channel_type,
        }
        chat = seen or await self.find(chat_key)
        if chat is not None and is_stated(chat, known):
            return chat
        stated = {name: value for name, value in known.items() if value is not None}
        new = insert(self._dialect, CHATS).values(
            {
                "chat_key": chat_key,
                "container_key": f"sandbox_{new_id()}",
                "created_at": now(),
                "channel_name": None,
                **channel_of(chat_key)._asdict(),
                **stated,
            }
        )
        kept = {
            name: new.excluded[name] if name in stated else func.coalesce(CHATS.c[name], new.excluded[name])
            for name in _KNOWN
        }
        statement = new.on_conflict_do_update(index_elements=[CHATS.c.chat_key], set_=kept)
        return found(await self._one_or_none(ChatInfo, statement.returning(CHATS)), "chat", chat_key)

    async def find(self, chat_key: str) -> ChatInfo | None:
        """Return the chat, or None."""
        return await self._one_or_none(ChatInfo, _find_statement, {"of_chat": chat_key})

    async def find_locked(self, chat_key: str) -> ChatInfo | None:
        """Return the chat, whose row is locked as by ``lock``, or None."""
        chat = await self._one_or_none(ChatInfo, _find_locked_statement, {"of_chat": chat_key})
        if chat is not None:
            self._connection.locked_chats.setdefault(chat_key, None)
        return chat

    async def get(self, chat_key: str) -> ChatInfo:
        """Return the chat.

        Raises:
            NotFoundError: there is none.
        """
        return found(await self.find(chat_key), "chat", chat_key)

    async def reset(self, chat_key: str) -> None:
        """Begin a new conversation: ``MessageRepository.newest`` no longer returns the present messages.

        Their summaries are deleted.

        Raises:
            NotFoundError: there is no such chat.
        """
        await self.lock(chat_key)
        newest = (
            select(func.coalesce(func.max(MESSAGES.c.sequence), 0))
            .where(MESSAGES.c.chat_key == chat_key)
            .scalar_subquery()
        )
        await self._count(
            update(CHATS).where(CHATS.c.chat_key == chat_key).values(history_after=newest, reset_at=now())
        )
        await self._count(delete(CHAT_SUMMARIES).where(CHAT_SUMMARIES.c.chat_key == chat_key))

    async def give_title(self, chat_key: str, title: str | None) -> None:
        """Give the chat a title; None takes it away.

        Raises:
            NotFoundError: there is no such chat.
        """
        await self.lock(chat_key)
        await self._count(update(CHATS).where(CHATS.c.chat_key == chat_key).values(title=title))

    async def use_model_group(self, chat_key: str, group: str | None) -> None:
        """Choose the model group of the chat; None means ``default``.

        Raises:
            NotFoundError: there is no such chat.
        """
        await self.lock(chat_key)
        await self._count(update(CHATS).where(CHATS.c.chat_key == chat_key).values(model_group=group))

    async def copy_choices(self, of_chat: str, to_chat: str) -> None:
        """Give a chat the persona and the model group of another one.

        Raises:
            NotFoundError: there is no such chat.
        """
        await self.lock(to_chat)
        of_other = select(CHATS.c.preset_id, CHATS.c.model_group).where(CHATS.c.chat_key == of_chat)
        preset_id, model_group = (await self._rows(of_other)).first() or (None, None)
        await self._count(
            update(CHATS)
            .where(CHATS.c.chat_key == to_chat)
            .values(preset_id=preset_id, model_group=model_group)
        )

    async def lock(self, chat_key: str, *, create: bool = False, exists: bool = False) -> None:
        """Lock the chat's row against other writers until this transaction ends.

        Args:
            create: whether to create the row of a new chat.
            exists: whether the chat certainly has a row; then nothing is asked on SQLite, whose write
                transactions exclude each other.

        Raises:
            NotFoundError: there is no such chat.
        """
        if chat_key in self._connection.locked_chats:
            return
        if exists and self._dialect == "sqlite":
            self._connection.locked_chats[chat_key] = None
            return
        if await self._scalar(_lock_statement, {"of_chat": chat_key}) is None:
            if not create:
                raise NotFoundError(
                    f"there is no chat {chat_key!r}; its first message begins it (`nekro send`)"
                )
            await self.ensure(chat_key)
            await self._scalar(_lock_statement, {"of_chat": chat_key})
        self._connection.locked_chats[chat_key] = None

    async def acquire(self, chat_key: str, *, owner: str, lease_seconds: float) -> int | None:
        """Acquire the lease to run the chat's rounds; returns the fencing token.

        None when the lease is held, even by the same owner, or when there is no such chat.
        """
        statement = (
            update(CHATS)
            .where(CHATS.c.chat_key == chat_key, is_free(CHATS.c.lease_until))
            .values(**take_values(CHATS, owner=owner, lease_seconds=lease_seconds))
            .returning(CHATS.c.fence)
        )
        self._connection.locked_chats.pop(chat_key, None)  # the remembered fence is out of date
        fence: int | None = await self._scalar(statement)
        return fence

    async def acquire_next(
        self, announced: str, *, owner: str, lease_seconds: float
    ) -> tuple[str, int] | None:
        """Acquire the lease of the free chat whose requested round is due and next in the fair order.

        Returns its key and the fencing token; None if no chat needs a worker. A transaction that has
        locked the row of such a chat is waited for, if there is no other one.

        Args:
            announced: a chat that was announced; it comes first if its running round has lost its worker.
        """
        values = {"announced": announced, "new_owner": owner, "lease_seconds": lease_seconds}
        for statement in _ACQUIRE_NEXT[self._dialect]:
            taken = (await self._rows(statement, values)).first()
            if taken is not None:
                self._connection.locked_chats.pop(taken[0], None)  # the remembered fence is out of date
                return taken[0], taken[1]
        return None

    async def release(self, chat_key: str, *, fence: int) -> bool:
        """Release the lease; False when another holder has it."""
        self._connection.locked_chats.pop(chat_key, None)
        return await self._count(_release_statement, {"of_chat": chat_key, "of_fence": fence}) > 0

    async def hold(self, chat_key: str, *, fence: int) -> None:
        """Lock the chat's row, as the holder of its lease, until this transaction ends.

        Raises:
            FencedError: the lease was released or passed to another holder.
        """
        if self._connection.locked_chats.get(chat_key) == fence:
            return
        if await self._scalar(_hold_statement, {"of_chat": chat_key, "of_fence": fence}) is None:
            raise _fenced(chat_key, fence)
        self._connection.locked_chats[chat_key] = fence

    async def hold_of_round(self, round_id: str, *, fence: int) -> None:
        """As ``hold``, for the chat of a round.

        Raises:
            NotFoundError: there is no such round.
            FencedError: as for ``hold``.
        """
        chat_key = await self._scalar(_hold_of_round_statement, {"of_round": round_id, "of_fence": fence})
        if chat_key is not None:
            self._connection.locked_chats[chat_key] = fence
            return
        chat_key = await self._scalar(select(ROUNDS.c.chat_key).where(ROUNDS.c.id == round_id))
        if chat_key is None:
            raise NotFoundError(f"there is no round {round_id!r}")
        raise _fenced(chat_key, fence)


@FixedStatement
def _find_statement(_dialect: str) -> Executable:
    return select(CHATS).where(CHATS.c.chat_key == bindparam("of_chat"))


@FixedStatement
def _find_locked_statement(_dialect: str) -> Executable:
    return select(CHATS).where(CHATS.c.chat_key == bindparam("of_chat")).with_for_update(key_share=True)


def _fenced(chat_key: str, fence: int) -> FencedError:
    return FencedError(f"chat {chat_key!r}: lease {fence} was released or passed to another worker")


@FixedStatement
def _hold_of_round_statement(_dialect: str) -> Executable:
    of_round = select(ROUNDS.c.chat_key).where(ROUNDS.c.id == bindparam("of_round")).scalar_subquery()
    return (
        select(CHATS.c.chat_key)
        .where(CHATS.c.chat_key == of_round, is_held_by(CHATS, bindparam("of_fence", type_=Integer)))
        .with_for_update(key_share=True, of=CHATS)
    )


@FixedStatement
def _hold_statement(_dialect: str) -> Executable:
    return (
        select(CHATS.c.fence)
        .where(
            CHATS.c.chat_key == bindparam("of_chat"),
            is_held_by(CHATS, bindparam("of_fence", type_=Integer)),
        )
        .with_for_update(key_share=True)
    )


@FixedStatement
def _release_statement(_dialect: str) -> Executable:
    is_held = is_held_by(CHATS, bindparam("of_fence", type_=Integer))
    return update(CHATS).where(CHATS.c.chat_key == bindparam("of_chat"), is_held).values(**release_values())


@FixedStatement
def _lock_statement(_dialect: str) -> Executable:
    # SQLite has no row locks and needs none: its write transactions exclude each other.
    statement = select(CHATS.c.fence).where(CHATS.c.chat_key == bindparam("of_chat"))
    return statement.with_for_update(key_share=True)


def _acquire_next_statement(*, waits: bool) -> FixedStatement:
    """UPDATE that acquires the lease; the subqueries run once, because they depend on no row of it.

    Args:
        waits: wait for locked rows instead of skipping them.
    """
    chat = CHATS.alias("chat")
    of_free_chat = (
        select(chat.c.chat_key)
        .join(ROUNDS, ROUNDS.c.chat_key == chat.c.chat_key)
        .where(is_free(chat.c.lease_until))
    )
    abandoned = of_free_chat.where(
        chat.c.chat_key == bindparam("announced", type_=CHATS.c.chat_key.type),
        is_one_of(ROUNDS.c.state, RoundState.REQUESTED, RoundState.RUNNING),  # as the partial index has it
        is_one_of(ROUNDS.c.state, RoundState.RUNNING),
    )
    following = (
        of_free_chat.where(
            is_one_of(ROUNDS.c.state, RoundState.REQUESTED),
            ROUNDS.c.fair_position >= literal_column("0"),  # as the index has it
            ROUNDS.c.not_before <= now(),
        )
        .order_by(ROUNDS.c.fair_position, ROUNDS.c.sequence)
        .limit(literal_column("1"))
        .with_for_update(key_share=True, of=chat, skip_locked=not waits)
    )
    chosen = func.coalesce(abandoned.scalar_subquery(), following.scalar_subquery())
    values = take_values(
        CHATS,
        owner=bindparam("new_owner", type_=CHATS.c.owner.type),
        lease_seconds=seconds_parameter("lease_seconds"),
    )
    statement = update(CHATS).where(CHATS.c.chat_key == chosen, is_free(CHATS.c.lease_until)).values(**values)
    return FixedStatement(lambda _dialect: statement.returning(CHATS.c.chat_key, CHATS.c.fence))


#: By dialect. Skipping comes first: workers that look at the same time would all wait for one row. SQLite has
#: no row locks.
_ACQUIRE_NEXT: Final = {
    "sqlite": [_acquire_next_statement(waits=False)],
    "postgresql": [_acquire_next_statement(waits=False), _acquire_next_statement(waits=True)],
}

#: Versions of a chat that are kept; an open turn shows the one that was the newest when it began.
KEPT_VERSIONS: Final = 10


@dataclass(frozen=True, kw_only=True)
class NewSummary:
    """A summary of the messages of a chat up to one of them."""

    chat_key: str
    #: Grows by 1 within a chat; the first one after a reset is 1.
    version: int
    #: Sequence of the newest message that it covers.
    up_to: int
    #: When the oldest and the newest of them were written.
    oldest_at: datetime
    newest_at: datetime
    text: str
    #: The model group that was asked and the model that answered, as the endpoint names it.
    group_name: str
    model: str
    #: Of this version alone.
    prompt_tokens: int | None
    answer_tokens: int | None
    #: Whether they are an estimate, because the endpoint reported no possible number.
    tokens_estimated: bool
    cost: float


@dataclass(frozen=True, kw_only=True)
class Summary(NewSummary):
    """A recorded summary."""

    created_at: datetime


class SummaryRepository(Repository):
    """Rows of summaries.

    Every row that exists is valid: a reset, and the change or deletion of a message, delete those that cover
    it in the same transaction.
    """

    async def newest(self, chat_key: str, *, before: datetime | None = None) -> Summary | None:
        """Return the chat's newest summary, or None.

        Args:
            before: only one that was recorded before this time; None does not limit.
        """
        statement = select(CHAT_SUMMARIES).where(CHAT_SUMMARIES.c.chat_key == chat_key)
        if before is not None:
            statement = statement.where(CHAT_SUMMARIES.c.created_at < before)
        return await self._one_or_none(Summary, statement.order_by(CHAT_SUMMARIES.c.version.desc()).limit(1))

    async def versions(self, chat_key: str) -> list[Summary]:
        """List the chat's summaries, the newest first."""
        statement = select(CHAT_SUMMARIES).where(CHAT_SUMMARIES.c.chat_key == chat_key)
        return await self._all(Summary, statement.order_by(CHAT_SUMMARIES.c.version.desc()))

    async def add(self, summary: NewSummary, *, history_revision: int, reset_at: datetime | None) -> bool:
        """Record the next version; False if the history changed, or another process was faster.

        Args:
            history_revision, reset_at: those of the chat when its messages were read.

        Raises:
            NotFoundError: there is no such chat.
        """
        chats = ChatRepository(self._connection)
        await chats.lock(summary.chat_key)
        chat = await chats.get(summary.chat_key)
        if (chat.history_revision, chat.reset_at) != (history_revision, reset_at):
            return False
        newest = await self.newest(summary.chat_key)
        if summary.version != (1 if newest is None else newest.version + 1):
            return False
        values = values_of(summary, NewSummary)
        new = insert(self._dialect, CHAT_SUMMARIES).values(**values, created_at=now())
        added = await self._one_or_none(Summary, new.on_conflict_do_nothing().returning(CHAT_SUMMARIES))
        if added is None:
            return False
        await self._count(
            delete(CHAT_SUMMARIES).where(
                CHAT_SUMMARIES.c.chat_key == summary.chat_key,
                CHAT_SUMMARIES.c.version <= summary.version - KEPT_VERSIONS,
            )
        )
        return True


@dataclass(frozen=True, kw_only=True)
class TurnVariables:
    """The variables of an open turn."""

    turn_id: str
    chat_key: str
    #: The round whose program left them.
    round_id: str
    #: Tagged text of each variable by its name, as the host has checked it.
    kept: dict[str, str]
    #: Names of variables that were not kept.
    not_kept: list[str]


class VariableRepository(Repository):
    """Rows of variables: one per open turn."""

    async def find(self, turn_id: str) -> TurnVariables | None:
        """Return the variables of a turn, or None."""
        statement = select(TURN_VARIABLES).where(TURN_VARIABLES.c.turn_id == turn_id)
        return await self._one_or_none(TurnVariables, statement)

    async def replace(self, variables: TurnVariables) -> None:
        """Store the variables of a turn; the caller holds the lease of the chat."""
        values: dict[str, Any] = {**vars(variables), "updated_at": now()}
        new = insert(self._dialect, TURN_VARIABLES).values(**values)
        changed = {name: new.excluded[name] for name in values if name != "turn_id"}
        await self._count(new.on_conflict_do_update(index_elements=[TURN_VARIABLES.c.turn_id], set_=changed))

    async def drop(self, *turn_ids: str) -> None:
        """Delete the variables of turns."""
        if turn_ids:
            await self._count(delete(TURN_VARIABLES).where(TURN_VARIABLES.c.turn_id.in_(turn_ids)))


@cache
def _kept_statement() -> Executable:
    is_chosen = ROUND_PROMPTS.c.round_id.in_(bindparam("rounds", expanding=True))
    return select(ROUND_PROMPTS.c.round_id).where(is_chosen)


class PromptRepository(Repository):
    """Rows of prompts: the newest one of each round."""

    async def keep(self, round_id: str, prompt: str) -> None:
        """Store what is sent in a round, in place of what an earlier request of it sent.

        Args:
            prompt: messages as JSON.
        """
        values = {"round_id": round_id, "prompt": prompt, "sent_at": now()}
        new = insert(self._dialect, ROUND_PROMPTS).values(values)
        changed = {name: new.excluded[name] for name in ("prompt", "sent_at")}
        await self._count(new.on_conflict_do_update(index_elements=[ROUND_PROMPTS.c.round_id], set_=changed))

    async def kept(self, round_ids: Collection[str]) -> set[str]:
        """Return those of the rounds whose prompts are kept."""
        return set((await self._rows(_kept_statement(), {"rounds": list(round_ids)})).scalars())

    async def of_rounds(self, round_ids: Collection[str]) -> dict[str, list[dict[str, Any]]]:
        """Return the messages of prompts by the ids of their rounds; what is not kept is left out."""
        statement = select(ROUND_PROMPTS.c.round_id, ROUND_PROMPTS.c.prompt).where(
            ROUND_PROMPTS.c.round_id.in_(round_ids)
        )
        return {row[0]: json.loads(row[1]) for row in await self._rows(statement)}
