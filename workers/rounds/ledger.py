"""Records the states of rounds that this worker runs: started, answered, ended, stopped."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from loguru import logger

from nekro.agent import verdict
from nekro.app.calls.run_calls import CallRecord
from nekro.app.chats.events import record, round_ended, round_started
from nekro.app.chats.publisher import EventPublisher
from nekro.app.chats.writer import append_message
from nekro.app.retried_writes import write_with_retries
from nekro.app.rounds.endings import RoundEndings, count_after_commit
from nekro.app.rounds.runs import call_json
from nekro.app.rounds.turn_ends import TurnFault
from nekro.sandbox.models import STOPS, StopType
from nekro_agent.errors import LLMError, NekroError, StorageUnavailableError
from nekro_agent.ports import MessageKind
from storage.engine import Database
from storage.listings.chats import terms_of
from storage.repositories.chats import TurnVariables
from storage.repositories.events import EventRepository
from storage.repositories.messages import ANSWER_KEY, NewMessage
from storage.repositories.rounds import ClaimedRound, Round, RoundReport
from storage.states import RoundState
from storage.transaction import Transaction

if TYPE_CHECKING:
    from nekro.agent.llm import LLMAnswer
    from nekro.agent.rounds import RoundOutcome
    from nekro.app.model_meters import RoundMeter
    from storage.repositories.parked_programs import ParkedProgram
    from workers.rounds.attempt_events import AttemptEvents

__all__ = ["RoundLedger"]

_STOPPED: Final = "stopped on request"


class RoundLedger:
    """Records the rounds of chats whose lease the caller holds."""

    def __init__(
        self,
        database: Database,
        publisher: EventPublisher,
        endings: RoundEndings,
        *,
        redact: Callable[[str], str],
    ) -> None:
        """Create the ledger.

        Args:
            endings: records what follows from the end of a round.
            redact: removes secrets and host paths from errors that are reported to the chat.
        """
        self._database = database
        self._publisher = publisher
        self.endings = endings
        self._redact = redact

    async def start_next(self, chat_key: str, *, fence: int, worker: str) -> ClaimedRound | None:
        """End rounds of a dead worker, then start the chat's next round; None when none is due.

        Raises:
            FencedError: the lease was lost.
        """
        async with self._database.begin() as transaction:
            await self.endings.take_over(transaction, chat_key, fence)
            claimed = await transaction.rounds.claim_next(chat_key, fence=fence, worker=worker)
            if claimed is not None:
                record(transaction, self._publisher, chat_key, round_started(claimed))
        return None if claimed is None else replace(claimed, chat=transaction.events.chat(chat_key))

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
        parked: ParkedProgram | None = None,
    ) -> tuple[Round, ClaimedRound | None]:
        """Record the end of a round with its consequences; returns it, and the next round if started.

        They are the answer in words, the notice and the follow-up round. A round that was asked to stop
        meanwhile ends as CANCELLED, without any of them.

        Args:
            next_worker: worker that runs the chat's next round, if one is due: it is started in the
                same transaction. None: the next holder of the chat starts it.
            meter: settles what the round used; None: nothing is counted.
            earlier: rounds whose ends are recorded, such as those of its turn.
            parked: what its program waits for; None: the program has ended.

        Raises:
            FencedError: the lease was lost.
        """
        report = outcome.report
        following: ClaimedRound | None = None
        events_of_end: EventRepository | None = None

        async def write(transaction: Transaction) -> Round:
            nonlocal following, events_of_end
            following, events_of_end = None, transaction.events
            merged = claimed.merged
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
                if parked is not None:
                    await transaction.parked_programs.park(parked)
                if ended.attempt > 1:
                    call_id = None if parked is None else parked.call_id
                    merged += tuple(await transaction.rounds.merge_moot(ended, parked_call=call_id))
                if claimed.round.answered_at is not None:
                    merged += tuple(await transaction.parked_programs.drop_copies(ended, expected))
            fault = None
            if outcome.notice is not None:
                fault = TurnFault(code=outcome.notice_code or verdict.TURN_LIMIT, text=outcome.notice)
            if ended.state is not RoundState.CANCELLED and next_worker is not None:
                following = await transaction.rounds.claim_next(
                    ended.chat_key, fence=fence, worker=next_worker, expected=expected
                )
            await self.endings.end_turns(
                transaction,
                ended,
                merged=merged,
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
                await self.endings.explain_failure(transaction, ended, said)
            await self.endings.end_turns(
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
            await self.endings.end_turns(transaction, ended)
            return ended

        await self._write_with_retries(write, events)
        logger.info("round_cancelled")

    async def _request_consequences(
        self, transaction: Transaction, ended: Round, claimed: ClaimedRound, outcome: RoundOutcome
    ) -> Round | None:
        """Record what follows from a round; returns the follow-up round if it is requested here."""
        if outcome.notice is not None:
            await self.endings.append_notice(transaction, ended, outcome.notice, kind=MessageKind.ASSISTANT)
        # The follow-up round of a result was requested by the worker that ran the method.
        if outcome.needs_follow_up and outcome.report.stop_type not in STOPS.values():
            return await self.endings.request_follow_up(transaction, ended, user_id=claimed.user_id)
        return None

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
        count_after_commit(transaction, ended)
        if ended.state is RoundState.CANCELLED:
            await self.endings.cancel_calls(transaction, ended)
            await self.endings.split(transaction, ended)
        return ended

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
                self._database.begin,
                write,
                unknown=None,
                seconds=self.endings.lease_seconds,
                on_failure=report,
            )


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


def _calls(calls: Sequence[CallRecord]) -> list[dict[str, Any]]:
    return [call_json(record) for record in calls]
