"""Records the states of rounds: started, answered, ended, stopped, interrupted.

Each change is one transaction together with its consequences (follow-up round, notice to the
chat, cancelled calls), under the chat's lock and the fencing token of its lease.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from loguru import logger

from broker_config.settings import AgentSettings
from nekro.agent import verdict
from nekro.app.approvals.decisions import cancel_pending
from nekro.app.calls.detached import end_job
from nekro.app.calls.dispatch import CallRecord
from nekro.app.chats.events import record, round_ended, round_started
from nekro.app.chats.publisher import EventPublisher
from nekro.app.chats.writer import append_message
from nekro.app.retried_writes import write_with_retries
from nekro.app.rounds.chat_history import ANSWER_KEY
from nekro.app.rounds.runs import call_json, listed_calls
from nekro.app.rounds.turn_ends import TurnFault, interruption_of, record_turn_spans, turn_ends, woken_by
from nekro.base.metrics import is_counting, metrics
from nekro.broker.tracing import is_tracing
from nekro.sandbox.models import STOPS, StopType
from nekro_agent.errors import LLMError, NekroError, StorageUnavailableError
from nekro_agent.ports import JobState, MessageKind
from storage.engine import Database
from storage.listings.chats import terms_of
from storage.repositories.chats import TurnVariables
from storage.repositories.events import EventRepository
from storage.repositories.messages import NewMessage
from storage.repositories.rounds import ClaimedRound, Round, RoundReport, RoundRequest
from storage.states import RoundState, TriggerKind
from storage.transaction import Transaction

if TYPE_CHECKING:  # workers of other lanes record the end of rounds, too, and run none
    from nekro.agent.llm import LLMAnswer
    from nekro.agent.rounds import RoundOutcome
    from nekro.app.model_meters import RoundMeter
    from nekro.app.rounds.events import AttemptEvents

__all__ = ["RoundLedger"]

_STOPPED: Final = "stopped on request"
_CALL_STOPPED: Final = "its round was stopped on request"
#: Code of a turn whose worker died in every attempt.
_WORKER_DIED: Final = "worker_died"


class RoundLedger:
    """Records the rounds of chats whose lease the caller holds."""

    def __init__(
        self,
        database: Database,
        publisher: EventPublisher,
        settings: AgentSettings,
        *,
        max_attempts: int,
        keeps_variables: bool,
        redact: Callable[[str], str],
        settle_interrupted: Callable[[Transaction, Round], Awaitable[None]],
    ) -> None:
        """Create the ledger.

        Args:
            max_attempts: how often a round is started whose worker dies before the LLM answers.
            keeps_variables: whether open turns may have variables of their programs.
            redact: removes secrets and host paths from errors that are reported to the chat.
            settle_interrupted: counts what a round used whose worker died after the answer.
        """
        self._database = database
        self._publisher = publisher
        self._settings = settings
        self._max_attempts = max_attempts
        self._keeps_variables = keeps_variables
        self._redact = redact
        self._settle_interrupted = settle_interrupted

    async def start_next(self, chat_key: str, *, fence: int, worker: str) -> ClaimedRound | None:
        """End rounds of a dead worker, then start the chat's next round; None when none is due.

        Raises:
            FencedError: the lease was lost.
        """
        async with self._database.begin() as transaction:
            await self._settle_orphans(transaction, chat_key, fence)
            claimed = await transaction.rounds.claim_next(chat_key, fence=fence, worker=worker)
            if claimed is not None:
                record(transaction, self._publisher, chat_key, round_started(claimed))
        return None if claimed is None else replace(claimed, chat=transaction.events.chat(chat_key))

    async def settle_orphans(self, chat_key: str, *, fence: int) -> None:
        """End rounds of a dead worker without starting any.

        Raises:
            FencedError: the lease was lost.
        """
        async with self._database.begin() as transaction:
            await self._settle_orphans(transaction, chat_key, fence)

    async def announce_due(self, chat_key: str) -> float | None:
        """Publish that a round of the chat is due, if one is; else return the seconds until one is due.

        Call it after releasing the chat: a trigger that came while the lease was held was rejected, and
        only this check finds its row.
        """
        async with self._database.read() as transaction:
            seconds = await transaction.rounds.seconds_until_due(chat_key)
        if seconds is not None and seconds <= 0:
            await self._publisher.round_requested(chat_key)
            return None
        return seconds

    async def answered(
        self,
        claimed: ClaimedRound,
        report: RoundReport,
        llm: LLMAnswer,
        events: AttemptEvents,
        *,
        fence: int,
    ) -> None:
        """Record the model's answer before its code runs.

        Raises:
            FencedError: the lease was lost; the code must not run.
        """
        events.code_ready(report.code or "", llm)
        async with events.held(), self._database.begin() as transaction:
            await transaction.rounds.record(claimed.round.id, fence=fence, report=report)
            await events.take(transaction, later=True)

    async def finish(
        self,
        claimed: ClaimedRound,
        outcome: RoundOutcome,
        calls: Sequence[CallRecord],
        events: AttemptEvents,
        *,
        fence: int,
        next_worker: str | None = None,
        meter: RoundMeter | None = None,
        earlier: Sequence[Round] = (),
    ) -> tuple[Round, ClaimedRound | None]:
        """Record the end of a round with its consequences; returns it, and the next round if started.

        They are the answer in words, the notice and the follow-up round. A round that was asked to stop
        meanwhile ends as CANCELLED, without any of them.

        Args:
            next_worker: worker that runs the chat's next round, if one is due: it is started in the
                same transaction. None: the next holder of the chat starts it.
            meter: settles what the round used; None: nothing is counted.
            earlier: rounds whose ends are recorded, such as those of its turn.

        Raises:
            FencedError: the lease was lost.
        """
        report = outcome.report
        following: ClaimedRound | None = None
        events_of_end: EventRepository | None = None

        async def write(transaction: Transaction) -> Round:
            nonlocal following, events_of_end
            following, events_of_end = None, transaction.events
            later = next_worker is not None
            ended = await self._end(
                transaction,
                claimed,
                replace(report, calls=_calls(calls)),
                events,
                fence=fence,
                words=outcome.words,
                later=later,
            )
            if meter is not None:
                await meter.ended(
                    transaction,
                    ended,
                    llm=outcome.llm,
                    run=outcome.run,
                    turn_goes_on=outcome.needs_follow_up and ended.state is not RoundState.CANCELLED,
                )
            expected = next((call.round_id for call in calls if call.round_id is not None), None)
            if ended.state is not RoundState.CANCELLED:
                requested = await self._request_consequences(transaction, ended, claimed, outcome)
                expected = expected if requested is None else requested.id
                await _keep_variables(transaction, ended, outcome)
            fault = None
            if outcome.notice is not None:
                fault = TurnFault(code=outcome.notice_code or verdict.TURN_LIMIT, text=outcome.notice)
            if ended.state is not RoundState.CANCELLED and next_worker is not None:
                following = await transaction.rounds.claim_next(
                    ended.chat_key, fence=fence, worker=next_worker, expected=expected
                )
            await self._end_turns(
                transaction,
                ended,
                merged=claimed.merged,
                following=following,
                fault=fault,
                known_terms={
                    term for one in earlier if one.turn_id == ended.turn_id for term in terms_of(one)
                },
            )
            if following is not None:
                record(transaction, self._publisher, ended.chat_key, round_started(following), later=True)
            return ended

        ended = await self._write_with_retries(write, events)
        if following is not None and events_of_end is not None:
            following = replace(following, chat=events_of_end.chat(ended.chat_key))
        stop = None if report.stop_type is None else StopType(report.stop_type).name
        logger.bind(
            chat_key=ended.chat_key,
            number=ended.number,
            state=ended.state.value,
            stop_type=stop,
            needs_follow_up=outcome.needs_follow_up,
        ).info("round_ended")
        return ended, following

    async def _request_consequences(
        self, transaction: Transaction, ended: Round, claimed: ClaimedRound, outcome: RoundOutcome
    ) -> Round | None:
        """Record what follows from a round; returns the follow-up round if it is requested here."""
        if outcome.notice is not None:
            await self._append_notice(transaction, ended, outcome.notice, kind=MessageKind.ASSISTANT)
        # The follow-up round of a result was requested by the worker that ran the method.
        if outcome.needs_follow_up and outcome.report.stop_type not in STOPS.values():
            return await self._request_follow_up(transaction, ended, user_id=claimed.user_id)
        return None

    async def fail(
        self,
        claimed: ClaimedRound,
        error: NekroError,
        calls: Sequence[CallRecord],
        events: AttemptEvents,
        *,
        fence: int,
        meter: RoundMeter | None = None,
    ) -> None:
        """Record that a round failed, and report the reason to the chat.

        Args:
            meter: as in ``finish``.

        Raises:
            FencedError: the lease was lost.
        """
        report = RoundReport(error=self._redact(str(error)), calls=_calls(calls))

        async def write(transaction: Transaction) -> Round:
            ended = await self._end(
                transaction, claimed, report, events, fence=fence, state=RoundState.FAILED
            )
            if meter is not None:
                await meter.ended(transaction, ended)
            if ended.state is RoundState.FAILED:
                said = error.for_people if isinstance(error, LLMError) else None
                await self._explain_failure(transaction, ended, said)
            await self._end_turns(
                transaction, ended, fault=TurnFault(code=error.code, text=report.error or "")
            )
            return ended

        await self._write_with_retries(write, events)
        logger.bind(error=report.error, error_type=type(error).__name__).error("round_failed")

    async def stop(
        self,
        claimed: ClaimedRound,
        calls: Sequence[CallRecord],
        events: AttemptEvents,
        *,
        fence: int,
        meter: RoundMeter | None = None,
    ) -> None:
        """Record that a round was stopped on request, and cancel its open calls.

        Args:
            meter: as in ``finish``.

        Raises:
            FencedError: the lease was lost.
        """
        report = RoundReport(error=_STOPPED, calls=_calls(calls))

        async def write(transaction: Transaction) -> Round:
            ended = await self._end(
                transaction, claimed, report, events, fence=fence, state=RoundState.CANCELLED
            )
            if meter is not None:
                await meter.ended(transaction, ended)
            await self._end_turns(transaction, ended)
            return ended

        await self._write_with_retries(write, events)
        logger.info("round_cancelled")

    async def cancel(self, chat_key: str, *, reason: str, turn_id: str | None = None) -> list[Round]:
        """Cancel waiting rounds and request the running one to stop; see ``RoundRepository.cancel``.

        Calls that wait for approval are withdrawn.

        Raises:
            NotFoundError: there is no such chat.
        """
        async with self._database.begin() as transaction:
            found = await transaction.rounds.cancel(chat_key, reason=reason, turn_id=turn_id)
            await cancel_pending(transaction, self._publisher, chat_key, reason=reason, turn_id=turn_id)
            ended = [item for item in found if item.state is RoundState.CANCELLED]
            for item in ended:
                await self._split(transaction, item)
            await self._end_turns(transaction, *ended)
        return found

    @property
    def lease_seconds(self) -> float:
        """How long a chat stays with a worker that does not renew its lease."""
        return self._settings.lease_seconds

    async def _write_with_retries(
        self, write: Callable[[Transaction], Awaitable[Round]], events: AttemptEvents
    ) -> Round:
        """Write, and retry for the time of a lease; a fenced write is safe to repeat.

        Raises:
            StorageUnavailableError: the database did not answer; another worker takes the round over.
        """

        def report(error: StorageUnavailableError) -> None:
            logger.bind(error=str(error)).warning("round_end_not_recorded")

        async with events.held():
            return await write_with_retries(
                self._database.begin, write, unknown=None, seconds=self.lease_seconds, on_failure=report
            )

    async def _end(
        self,
        transaction: Transaction,
        claimed: ClaimedRound,
        report: RoundReport,
        events: AttemptEvents,
        *,
        fence: int,
        state: RoundState = RoundState.DONE,
        words: str | None = None,
        later: bool = False,
    ) -> Round:
        ended = await transaction.rounds.finish(claimed.round.id, fence=fence, state=state, report=report)
        events.settle_words(words if ended.state is not RoundState.CANCELLED else None)
        await events.take(transaction, later=later)
        if words is not None and ended.state is not RoundState.CANCELLED:
            await self._send_words(transaction, ended, words, later=later)
        record(transaction, self._publisher, ended.chat_key, round_ended(ended), later=later)
        _count_after_commit(transaction, ended)
        if ended.state is RoundState.CANCELLED:
            await self._cancel_calls(transaction, ended)
            await self._split(transaction, ended)
        return ended

    async def _end_turns(
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

    async def _split(self, transaction: Transaction, cancelled: Round) -> None:
        """Request what a cancelled round had merged again: other turns are not cancelled with it."""
        if await transaction.rounds.split(cancelled.id):
            transaction.after_commit(lambda: self._publisher.round_requested(cancelled.chat_key))

    async def _settle_orphans(self, transaction: Transaction, chat_key: str, fence: int) -> None:
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
        _count_after_commit(transaction, orphan)
        fault = None
        if orphan.state is RoundState.FAILED:
            fault = TurnFault(code=_WORKER_DIED, text=orphan.error or "")
            await self._explain_failure(transaction, orphan)
        else:
            await self._cancel_calls(transaction, orphan)
            await self._split(transaction, orphan)
        await self._end_turns(transaction, orphan, fault=fault)

    async def _end_interrupted(self, transaction: Transaction, orphan: Round, fence: int) -> None:
        """End a round whose worker died after the answer: its code may have run and is not run again.

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
        _count_after_commit(transaction, ended)
        fault = None
        if ended.state is RoundState.CANCELLED:
            await self._split(transaction, ended)
        elif stop is None and ended.number < self._settings.rounds_per_turn:
            await self._request_follow_up(transaction, ended, user_id=ended.user_id)
        elif stop is None:
            notice = verdict.rounds_used_up(self._settings.rounds_per_turn).notice or ""
            fault = TurnFault(code=verdict.TURN_LIMIT, text=notice)
            await self._append_notice(transaction, ended, notice, kind=MessageKind.ASSISTANT)
        await self._end_turns(transaction, ended, fault=fault)

    async def _explain_failure(self, transaction: Transaction, ended: Round, said: str | None = None) -> None:
        """Record in the chat why a round failed.

        Args:
            said: the reason in a sentence for people, who get it as a message; None: a system message has
                the error itself.
        """
        if said is not None:
            notice = f"I could not answer: {said}."
            await self._append_notice(transaction, ended, notice, kind=MessageKind.ASSISTANT)
        else:
            notice = f"The agent could not answer: {ended.error}"
            await self._append_notice(transaction, ended, notice, kind=MessageKind.SYSTEM)

    async def _cancel_calls(self, transaction: Transaction, ended: Round) -> None:
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

    async def _request_follow_up(
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

    async def _send_words(self, transaction: Transaction, ended: Round, words: str, *, later: bool) -> None:
        """Send an answer in words, as a message of the turn like those that methods send."""
        message = NewMessage(
            chat_key=ended.chat_key,
            kind=MessageKind.ASSISTANT,
            text=words,
            round_id=ended.id,
            turn_id=ended.turn_id,
            once_key=f"{ANSWER_KEY}:{ended.id}",
        )
        await append_message(transaction, self._publisher, message, later=later)

    async def _append_notice(
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


async def _keep_variables(transaction: Transaction, ended: Round, outcome: RoundOutcome) -> None:
    """Store what the round's program left for the next round, if there is one."""
    kept = None if outcome.run is None else outcome.run.kept
    if kept is None or not outcome.needs_follow_up or outcome.report.stop_type == StopType.SECURITY:
        return
    await transaction.variables.replace(
        TurnVariables(
            turn_id=ended.turn_id,
            chat_key=ended.chat_key,
            round_id=ended.id,
            kept=dict(kept.values),
            not_kept=list(kept.not_kept),
        )
    )


def _count_after_commit(transaction: Transaction, ended: Round) -> None:
    async def count() -> None:
        _count(ended)

    transaction.after_commit(count)


def _count(ended: Round) -> None:
    stop_type = "none" if ended.stop_type is None else StopType(ended.stop_type).name
    metrics().rounds.labels(ended.state.value, stop_type).inc()
    if ended.started_at is not None and ended.finished_at is not None:
        metrics().round_seconds.observe((ended.finished_at - ended.started_at).total_seconds())


def _calls(calls: Sequence[CallRecord]) -> list[dict[str, Any]]:
    return [call_json(record) for record in calls]
