"""Ends rounds from any process: those of dead workers, and those that someone stops.

Each change is one transaction together with its consequences (follow-up round, notice to the
chat, cancelled calls), under the chat's lock and the fencing token of its lease.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import TYPE_CHECKING, Final

from loguru import logger

from broker_config.settings import AgentSettings
from nekro.agent import verdict
from nekro.app.approvals.decisions import cancel_pending
from nekro.app.calls.detached import end_job
from nekro.app.chats.events import record, round_ended
from nekro.app.chats.writer import append_message
from nekro.app.rounds.runs import listed_calls
from nekro.app.rounds.turn_ends import TurnFault, interruption_of, record_turn_spans, turn_ends, woken_by
from nekro.base.metrics import is_counting, metrics
from nekro.broker.tracing import is_tracing
from nekro.sandbox.models import StopType
from nekro_agent.ports import JobState, MessageKind
from storage.engine import Database
from storage.repositories.messages import NewMessage
from storage.repositories.rounds import ClaimedRound, Round, RoundReport, RoundRequest
from storage.states import RoundState, TriggerKind
from storage.transaction import Transaction

if TYPE_CHECKING:
    from nekro.app.chats.publisher import EventPublisher

__all__ = ["RoundEndings", "count_after_commit"]

_CALL_STOPPED: Final = "its round was stopped on request"
#: Code of a turn whose worker died in every attempt.
_WORKER_DIED: Final = "worker_died"


class RoundEndings:
    """Ends rounds of chats, and the turns that end with them."""

    def __init__(
        self,
        database: Database,
        publisher: EventPublisher,
        settings: AgentSettings,
        *,
        max_attempts: int,
        keeps_variables: bool,
        settle_interrupted: Callable[[Transaction, Round], Awaitable[None]],
    ) -> None:
        """Create it.

        Args:
            max_attempts: how often a round is started whose worker dies.
            keeps_variables: whether open turns may have variables of their programs.
            settle_interrupted: counts what a round used whose worker died after the answer.
        """
        self._database = database
        self._publisher = publisher
        self._settings = settings
        self._max_attempts = max_attempts
        self._keeps_variables = keeps_variables
        self._settle_interrupted = settle_interrupted

    async def cancel(
        self, chat_key: str, *, reason: str, turn_id: str | None = None
    ) -> tuple[list[Round], list[str]]:
        """Cancel waiting rounds and request the running one to stop; see ``RoundRepository.cancel``.

        Calls that wait for approval, or in which programs wait, are withdrawn; they are the second value.

        Raises:
            NotFoundError: there is no such chat.
        """
        async with self._database.begin() as transaction:
            found = await transaction.rounds.cancel(chat_key, reason=reason, turn_id=turn_id)
            waits = await cancel_pending(
                transaction, self._publisher, chat_key, reason=reason, turn_id=turn_id
            )
            ended = [item for item in found if item.state is RoundState.CANCELLED]
            for item in ended:
                if item.resumes:  # its program was to be run again
                    record(transaction, self._publisher, chat_key, round_ended(item))
                    await self.cancel_calls(transaction, item)
                await self.split(transaction, item)
            await self.end_turns(transaction, *ended)
        return found, waits

    async def settle_orphans(self, chat_key: str, *, fence: int) -> None:
        """End rounds of a dead worker without starting any.

        Raises:
            FencedError: the lease was lost.
        """
        async with self._database.begin() as transaction:
            await self.take_over(transaction, chat_key, fence)

    async def announce_due(self, chat_key: str) -> float | None:
        """Publish that a round of the chat is due, if one is; else return the seconds until one is due.

        Call it after releasing the chat: a trigger that came while the lease was held was rejected, and
        only this check finds its row.
        """
        seconds = await self.seconds_until_due(chat_key)
        if seconds is not None and seconds <= 0:
            await self._publisher.round_requested(chat_key)
            return None
        return seconds

    async def seconds_until_due(self, chat_key: str) -> float | None:
        """Return the seconds until a round of the chat is due, 0 if one is; None without one."""
        async with self._database.read() as transaction:
            return await transaction.rounds.seconds_until_due(chat_key)

    @property
    def lease_seconds(self) -> float:
        """How long a chat stays with a worker that does not renew its lease."""
        return self._settings.lease_seconds

    async def end_turns(
        self,
        transaction: Transaction,
        *ended: Round,
        merged: Sequence[Round] | None = None,
        following: ClaimedRound | None = None,
        fault: TurnFault | None = None,
        known_terms: Collection[str] = (),
    ) -> None:
        """Record the turns that the ends of these rounds end.

        Args:
            merged: the rounds that were merged into them; None reads them.
            following, known_terms: see ``turn_ends``.
        """
        if merged is None:
            merged = [item for one in ended for item in await transaction.rounds.merged_into(one.id)]
        ends = await turn_ends(
            transaction, ended, merged=merged, following=following, fault=fault, known_terms=known_terms
        )
        if ends:
            record(transaction, self._publisher, ended[0].chat_key, *ends)
            if self._keeps_variables:
                await transaction.variables.drop(*(end.turn_id for end in ends if end.turn_id))
            if is_tracing() or is_counting():
                transaction.after_commit(lambda: record_turn_spans(self._database, ends))

    async def split(self, transaction: Transaction, cancelled: Round) -> None:
        """Request what a cancelled round had merged again: other turns are not cancelled with it."""
        if await transaction.rounds.split(cancelled.id):
            transaction.after_commit(lambda: self._publisher.round_requested(cancelled.chat_key))

    async def take_over(self, transaction: Transaction, chat_key: str, fence: int) -> None:
        limit = self._max_attempts
        for orphan in await transaction.rounds.take_over(chat_key, fence=fence, max_attempts=limit):
            logger.bind(round_id=orphan.id, state=orphan.state.value).warning("round_taken_over")
            if orphan.answered_at is not None:
                await self._settle_interrupted(transaction, orphan)
            if orphan.state is RoundState.RUNNING:
                await self._end_interrupted(transaction, orphan, fence)
            elif orphan.state in (RoundState.FAILED, RoundState.CANCELLED):
                await self._end_orphan(transaction, orphan)

    async def _end_orphan(self, transaction: Transaction, orphan: Round) -> None:
        """Record the consequences of a round that ended with its worker."""
        record(transaction, self._publisher, orphan.chat_key, round_ended(orphan))
        count_after_commit(transaction, orphan)
        fault = None
        if orphan.state is RoundState.FAILED:
            fault = TurnFault(code=_WORKER_DIED, text=orphan.error or "")
            await self.explain_failure(transaction, orphan)
        else:
            await self.cancel_calls(transaction, orphan)
            await self.split(transaction, orphan)
        await self.end_turns(transaction, orphan, fault=fault)

    async def _end_interrupted(self, transaction: Transaction, orphan: Round, fence: int) -> None:
        """End a round whose worker died after the answer and that is not run again; its code may have run.

        If an AGENT result has requested a follow-up round, nothing else is needed. Otherwise a
        follow-up round asks the model to check the state.
        """
        rows = await transaction.calls.of_round(orphan.id)
        stop = await woken_by(transaction, rows)
        report = RoundReport(
            stop_type=int(StopType.ERROR if stop is None else stop),
            error=interruption_of(rows) if stop is None else None,
            calls=listed_calls([], rows, await transaction.approvals.of_calls(rows)),
        )
        ended = await transaction.rounds.finish(orphan.id, fence=fence, report=report)
        record(transaction, self._publisher, ended.chat_key, round_ended(ended))
        count_after_commit(transaction, ended)
        fault = None
        if ended.state is RoundState.CANCELLED:
            await self.split(transaction, ended)
        elif stop is None and ended.number < self._settings.rounds_per_turn:
            await self.request_follow_up(transaction, ended, user_id=ended.user_id)
        elif stop is None:
            notice = verdict.rounds_used_up(self._settings.rounds_per_turn).notice or ""
            fault = TurnFault(code=verdict.TURN_LIMIT, text=notice)
            await self.append_notice(transaction, ended, notice, kind=MessageKind.ASSISTANT)
        await self.end_turns(transaction, ended, fault=fault)

    async def explain_failure(self, transaction: Transaction, ended: Round, said: str | None = None) -> None:
        """Record in the chat why a round failed.

        Args:
            said: the reason in a sentence for people, who get it as a message; None: a system message has
                the error itself.
        """
        if said is not None:
            notice = f"I could not answer: {said}."
            await self.append_notice(transaction, ended, notice, kind=MessageKind.ASSISTANT)
        else:
            notice = f"The agent could not answer: {ended.error}"
            await self.append_notice(transaction, ended, notice, kind=MessageKind.SYSTEM)

    async def cancel_calls(self, transaction: Transaction, ended: Round) -> None:
        await cancel_pending(
            transaction, self._publisher, ended.chat_key, reason=_CALL_STOPPED, round_id=ended.id
        )
        # Calls that still run can no longer write; the revocation stops them too.
        calls = await transaction.calls.cancel_round(ended.id, reason=_CALL_STOPPED)
        for call in calls:
            if call.detached_at is not None:
                await end_job(transaction, self._publisher, call.id, JobState.CANCELLED, _CALL_STOPPED)
        if calls:
            transaction.after_commit(lambda: self._publisher.revoke(*(call.id for call in calls)))

    async def request_follow_up(
        self, transaction: Transaction, ended: Round, *, user_id: str | None
    ) -> Round:
        requested, _ = await transaction.rounds.request(
            RoundRequest(
                chat_key=ended.chat_key,
                trigger_kind=TriggerKind.ROUND,
                trigger_id=ended.id,
                turn_id=ended.turn_id,
                number=ended.number + 1,
                user_id=user_id,
            )
        )
        return requested

    async def append_notice(
        self, transaction: Transaction, ended: Round, text: str, *, kind: MessageKind
    ) -> None:
        message = NewMessage(
            chat_key=ended.chat_key,
            kind=kind,
            text=text,
            round_id=ended.id,
            once_key=f"notice:{ended.id}",
        )
        await append_message(transaction, self._publisher, message)


def count_after_commit(transaction: Transaction, ended: Round) -> None:
    async def count() -> None:
        _count(ended)

    transaction.after_commit(count)


def _count(ended: Round) -> None:
    stop_type = "none" if ended.stop_type is None else StopType(ended.stop_type).name
    metrics().rounds.labels(ended.state.value, stop_type).inc()
    if ended.started_at is not None and ended.finished_at is not None:
        metrics().round_seconds.observe((ended.finished_at - ended.started_at).total_seconds())
