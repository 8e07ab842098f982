"""Writes summaries of the older messages of chats in the background of a rounds worker.

No round waits for a summary: a chat is looked at after its rounds, one chat at a time, with a client of its
own. A failure is logged and leaves the chat as it was; the next turn of the chat is the next attempt.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from loguru import logger

from broker_config.settings import AgentSettings
from nekro.agent.history import SummaryTask, first_part, outgrown, read_summary, summary_request
from nekro.agent.llm import LLMAnswer, LLMClient
from nekro.agent.model import HistoryFile, HistoryImage, HistoryMessage, HistorySummary
from nekro.agent.room import ModelContexts, PromptRoom
from nekro.app.chats.attachments import Attachment, attachments_of
from nekro.app.leases import SUMMARY, LeaseKeeper
from nekro.app.model_meters import SummaryMeter
from nekro.base.tasks import end_tasks, log_errors
from nekro_agent.errors import BudgetExceededError, LLMError
from nekro_agent.ports import ChatInfo, MessageKind
from storage.engine import Database
from storage.repositories.chats import NewSummary, Summary
from storage.repositories.messages import ANSWER_KEY, Message
from storage.transaction import Transaction

__all__ = ["RETRY_SECONDS", "ChatSummaries", "shown_message", "summary_before"]

#: How long no summary is requested after a request failed; as for model groups that failed.
RETRY_SECONDS: Final = 60.0
#: The messages of a chat that summaries can reach back to, from the newest on.
_MOST_MESSAGES: Final = 2_000
#: Most requests for one chat in a row; a chat with more to do has its next ones after its next turn.
_MOST_REQUESTS: Final = 20
#: Most chats that wait; a further one is looked at after its next turn.
_MOST_WAITING: Final = 1_000


@dataclass(frozen=True, kw_only=True)
class _State:
    """A chat as one transaction read it."""

    chat: ChatInfo
    newest_version: int
    #: What the next version is built upon; None: the messages alone.
    base: Summary | None
    #: Those that the base does not cover, oldest first.
    messages: Sequence[HistoryMessage]


class ChatSummaries:
    """Writes the summaries that the settings ask for; bound to the event loop of its first use."""

    def __init__(
        self,
        database: Database,
        leases: LeaseKeeper,
        contexts: ModelContexts,
        create: Callable[[], LLMClient],
        settings: AgentSettings,
        *,
        meter: SummaryMeter,
        owner: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Create it.

        Args:
            create: makes the client of the model, at the first request.
            clock: seconds that only go forward.
        """
        self._database = database
        self._leases = leases
        self._contexts = contexts
        self._create = create
        self._settings = settings
        self._meter = meter
        self._owner = owner
        self._clock = clock
        self._client: LLMClient | None = None
        self._waiting: dict[str, None] = {}
        self._task: asyncio.Task[None] | None = None
        self._paused_until = 0.0

    def chat_rested(self, chat_key: str) -> None:
        """Schedule a look at a chat whose rounds have ended; does nothing without a group for summaries."""
        if self._settings.summary_group is None or self._clock() < self._paused_until:
            return
        if len(self._waiting) < _MOST_WAITING:
            self._waiting[chat_key] = None
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._work(), name="nekro-summaries")

    async def close(self) -> None:
        """Give up what is in progress, and release the client."""
        await end_tasks(self._task)
        if self._client is not None:
            await self._client.close()

    async def summarise(self, chat_key: str, *, afresh: bool = False) -> int:
        """Write the summaries that a chat lacks; returns how many versions were added.

        Returns 0 if prompts show the whole history, or another process writes for this chat.

        Args:
            afresh: from the messages alone, in place of the present summary.

        Raises:
            BudgetExceededError: a budget is used up; earlier versions are kept.
            LLMError: the model gave no summary; earlier versions are kept.
            NotFoundError: there is no such chat.
        """
        group = self._settings.summary_group
        if group is None:
            return 0
        lease = await self._leases.acquire(
            SUMMARY, f"summary.{chat_key}", owner=self._owner, seconds=self._settings.lease_seconds
        )
        if lease is None:
            return 0
        added = 0
        async with lease:
            while added < _MOST_REQUESTS:
                await lease.ensure()
                state = await self._read(chat_key, afresh=afresh and not added)
                if not await self._advance(state, group):
                    break
                added += 1
        return added

    async def _work(self) -> None:
        while self._waiting:
            chat_key = next(iter(self._waiting))
            del self._waiting[chat_key]
            with log_errors("summary_failed", chat_key=chat_key):
                try:
                    await self.summarise(chat_key)
                except BudgetExceededError:
                    continue  # the meter logged it; budgets of other chats may be left
                except LLMError:
                    self._paused_until = self._clock() + RETRY_SECONDS
                    self._waiting.clear()
                    raise

    async def _read(self, chat_key: str, *, afresh: bool) -> _State:
        async with self._database.read() as transaction:
            chat = await transaction.chats.get(chat_key)
            newest = await transaction.summaries.newest(chat_key)
            base = None if afresh else newest
            rows = await transaction.messages.newest(
                chat_key, limit=_MOST_MESSAGES, since=0 if base is None else base.up_to + 1
            )
        shown = [message for row in rows if (message := shown_message(row)) is not None]
        version = 0 if newest is None else newest.version
        return _State(chat=chat, newest_version=version, base=base, messages=shown)

    async def _advance(self, state: _State, group: str) -> bool:
        """Write the next version; False if there is nothing to do or the history changed."""
        chat_room = await self._contexts.room(state.chat.model_group)
        room = await self._contexts.room(group)
        # On a thread, because thousands of messages may have to be counted.
        older = await asyncio.to_thread(
            _older, state.messages, chat_room, room, most=self._settings.history_messages
        )
        if not older:
            return False
        task = SummaryTask(
            chat_key=state.chat.chat_key, group=group, previous=_previous(state.base), messages=older
        )
        tokens = chat_room.limits.summary
        answer = await self._ask(task, room, tokens=tokens)
        oldest_at = older[0].sent_at if state.base is None else state.base.oldest_at
        new = NewSummary(
            chat_key=task.chat_key,
            version=state.newest_version + 1,
            up_to=older[-1].sequence,
            oldest_at=oldest_at,
            newest_at=older[-1].sent_at,
            text=read_summary(answer, tokens=tokens),
            group_name=answer.group,
            model=answer.model,
            prompt_tokens=answer.prompt_tokens,
            answer_tokens=answer.answer_tokens,
            tokens_estimated=answer.is_estimated,
            cost=answer.cost,
        )
        async with self._database.begin() as transaction:
            is_added = await transaction.summaries.add(
                new, history_revision=state.chat.history_revision, reset_at=state.chat.reset_at
            )
        logger.bind(
            chat_key=new.chat_key,
            version=new.version,
            messages=len(older),
            model=new.model,
            prompt_tokens=new.prompt_tokens,
            answer_tokens=new.answer_tokens,
            cost=new.cost,
        ).info("summary_written" if is_added else "summary_out_of_date")
        return is_added

    async def _ask(self, task: SummaryTask, room: PromptRoom, *, tokens: int) -> LLMAnswer:
        if self._client is None:
            self._client = self._create()
        request = await asyncio.to_thread(summary_request, task, room, tokens=tokens)
        prompt_tokens = await asyncio.to_thread(room.tokens_of, request.messages)
        try:
            return await self._meter.ask(self._client, request, prompt_tokens=prompt_tokens)
        except LLMError as exc:
            if exc.is_too_long:
                self._contexts.learn(task.group, tokens=prompt_tokens, said=str(exc))
            raise


async def summary_before(transaction: Transaction, chat_key: str, moment: datetime) -> HistorySummary | None:
    """Return the summary that the rounds of a turn show: the newest one from before the turn, or None."""
    return _previous(await transaction.summaries.newest(chat_key, before=moment))


def _previous(summary: Summary | None) -> HistorySummary | None:
    if summary is None:
        return None
    return HistorySummary(text=summary.text, up_to=summary.up_to, newest_at=summary.newest_at)


def _older(
    messages: Sequence[HistoryMessage], chat_room: PromptRoom, room: PromptRoom, *, most: int
) -> Sequence[HistoryMessage]:
    """Return the messages of the next request; none if prompts show all of them."""
    older = messages[: outgrown(messages, chat_room, most=most)]
    return older[: first_part(older, room)]


def shown_message(message: Message) -> HistoryMessage | None:
    """Return what the model sees of a message; None for one that is not shown."""
    if message.is_hidden:
        return None
    attachments = attachments_of(message.data or {})
    # The agent made its own pictures; the prompt has their names.
    pictures = [a for a in attachments if a.kind == "image" and message.kind is MessageKind.USER]
    return HistoryMessage(
        message_id=message.id,
        kind=message.kind,
        text=message.text,
        sent_at=message.created_at,
        sequence=message.sequence,
        sender_name=message.sender_name or "",
        sender_id=message.sender_id or "",
        attachments=tuple(HistoryFile(**_facts(a)) for a in attachments if a not in pictures),
        images=tuple(HistoryImage(**_facts(a)) for a in pictures),
        observation_of=_source(message, "observation"),
        answer_of=_source(message, ANSWER_KEY),
    )


def _facts(attachment: Attachment) -> dict[str, Any]:
    return {
        "path": attachment.path,
        "name": attachment.name,
        "media_type": attachment.media_type,
        "size_bytes": attachment.size_bytes,
    }


def _source(message: Message, kind: str) -> str | None:
    """Id of the call whose result, or of the round whose answer the message is; None for other messages."""
    found, _, source_id = (message.once_key or "").partition(":")
    return source_id if found == kind else None
