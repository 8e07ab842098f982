"""Records the states of rounds: started, answered, ended, stopped, interrupted.

Each change is one transaction together with its consequences (follow-up round, notice to the
chat, cancelled calls), under the chat's lock and the fencing token of its lease.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final

from loguru import logger

from agent import verdict
from agent.rounds import RoundAnswer, RoundOutcome
from broker_config.settings import AgentSettings
from nekro_agent.durations import RETRY_SECONDS
from nekro_agent.errors import NekroError, StorageUnavailableError
from nekro_agent.ports import JobState, MessageKind
from runtime.metrics import metrics
from sandbox.models import STOPS, StopType
from storage.engine import Database
from storage.repositories.calls import Call
from storage.repositories.messages import NewMessage
from storage.repositories.rounds import ClaimedRound, Round, RoundReport, RoundRequest
from storage.states import CallState, RoundState, TriggerKind
from storage.transaction import Transaction
from workers.calls.detached import end_job
from workers.calls.dispatch import CallRecord
from workers.calls.story import call_json, told_calls
from workers.chats.publisher import EventPublisher
from workers.chats.writer import append_message

__all__ = ["ROUND_ENDED", "ROUND_STARTED", "RoundLedger"]

#: Events for observers; ``nekro tail`` shows them.
ROUND_STARTED: Final = "round.started"
ROUND_ENDED: Final = "round.ended"


_STOPPED: Final = "stopped on request"


class RoundLedger:
    """Records the rounds of chats whose lease the caller holds."""

    def __init__(
        self,
        database: Database,
        publisher: EventPublisher,
        settings: AgentSettings,
        *,
        max_attempts: int,
        redact: Callable[[str], str] = str,
    ) -> None:
        """Create the ledger.

        Args:
            max_attempts: how often a round is started whose worker dies before the LLM answers.
            redact: removes secrets and host paths from errors that are reported to the chat.
        """
        self._database = database
        self._publisher = publisher
        self._settings = settings
        self._max_attempts = max_attempts
        self._redact = redact

    async def start_next(self, chat_key: str, *, fence: int, worker: str) -> ClaimedRound | None:
        """End rounds of a dead worker, then start the chat's next round; None when none is due.

        Raises:
            FencedError: the lease was lost.
        """
        async with self._database.begin() as transaction:
            await self._settle_orphans(transaction, chat_key, fence)
            return await self._start(transaction, chat_key, fence, worker)

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

    async def answered(self, claimed: ClaimedRound, answer: RoundAnswer, *, fence: int) -> None:
        """Record the model's answer before its code runs.

        Raises:
            FencedError: the lease was lost; the code must not run.
        """
        report = RoundReport(
            prompt_chars=answer.prompt_chars,
            model=answer.llm.model,
            answer=answer.llm.text,
            code=answer.code,
            prompt_tokens=answer.llm.prompt_tokens,
            completion_tokens=answer.llm.answer_tokens,
            cost=answer.llm.cost,
        )
        async with self._database.begin() as transaction:
            await transaction.rounds.record(claimed.round.id, fence=fence, report=report)

    async def finish(
        self,
        claimed: ClaimedRound,
        outcome: RoundOutcome,
        calls: Sequence[CallRecord],
        *,
        fence: int,
        next_worker: str | None = None,
    ) -> tuple[Round, ClaimedRound | None]:
        """Record the end of a round with notice and follow-up; returns it, and the next round if started.

        A round that was asked to stop meanwhile ends as CANCELLED, without notice and follow-up.

        Args:
            next_worker: worker that runs the chat's next round, if one is due: it is started in the
                same transaction. None: the next holder of the chat starts it.

        Raises:
            FencedError: the lease was lost.
        """
        following: ClaimedRound | None = None

        async def write(transaction: Transaction) -> Round:
            nonlocal following
            following = None
            ended = await self._end(
                transaction, claimed, _report(outcome, calls), fence=fence, later=next_worker is not None
            )
            if ended.state is RoundState.CANCELLED:
                return ended
            if outcome.notice is not None:
                await self._tell_chat(transaction, ended, outcome.notice, kind=MessageKind.ASSISTANT)
            # The follow-up round of a result was requested by the worker that ran the method.
            if outcome.needs_follow_up and outcome.stop_type not in STOPS.values():
                await self._request_follow_up(transaction, ended, user_id=claimed.user_id)
            if next_worker is not None:
                following = await self._start(transaction, ended.chat_key, fence, next_worker, later=True)
            return ended

        ended = await self._surely(write)
        stop = None if outcome.stop_type is None else outcome.stop_type.name
        logger.bind(
            chat_key=ended.chat_key,
            number=ended.number,
            state=ended.state.value,
            stop_type=stop,
            needs_follow_up=outcome.needs_follow_up,
        ).info("round_ended")
        return ended, following

    async def fail(
        self, claimed: ClaimedRound, error: NekroError, calls: Sequence[CallRecord], *, fence: int
    ) -> None:
        """Record that a round failed, and report the reason to the chat.

        Raises:
            FencedError: the lease was lost.
        """
        report = RoundReport(error=self._redact(str(error)), calls=_calls(calls))

        async def write(transaction: Transaction) -> Round:
            ended = await self._end(transaction, claimed, report, fence=fence, state=RoundState.FAILED)
            if ended.state is RoundState.FAILED:
                await self._explain_failure(transaction, ended)
            return ended

        await self._surely(write)
        logger.bind(error=report.error, error_type=type(error).__name__).error("round_failed")

    async def stop(self, claimed: ClaimedRound, calls: Sequence[CallRecord], *, fence: int) -> None:
        """Record that a round was stopped on request, and cancel its open calls.

        Raises:
            FencedError: the lease was lost.
        """
        report = RoundReport(error=_STOPPED, calls=_calls(calls))

        async def write(transaction: Transaction) -> Round:
            return await self._end(transaction, claimed, report, fence=fence, state=RoundState.CANCELLED)

        await self._surely(write)
        logger.info("round_cancelled")

    @property
    def lease_seconds(self) -> float:
        """How long a chat stays with a worker that does not renew its lease."""
        return self._settings.lease_seconds

    async def _surely(self, write: Callable[[Transaction], Awaitable[Round]]) -> Round:
        """Write, and retry for the time of a lease; a fenced write is safe to repeat.

        Raises:
            StorageUnavailableError: the database did not answer; another worker takes the round over.
        """
        give_up_at = time.monotonic() + self.lease_seconds
        while True:
            try:
                async with self._database.begin() as transaction:
                    return await write(transaction)
            except StorageUnavailableError as exc:
                logger.bind(error=str(exc)).warning("round_end_not_recorded")
                if time.monotonic() > give_up_at:
                    raise
            await asyncio.sleep(RETRY_SECONDS)

    async def _end(
        self,
        transaction: Transaction,
        claimed: ClaimedRound,
        report: RoundReport,
        *,
        fence: int,
        state: RoundState = RoundState.DONE,
        later: bool = False,
    ) -> Round:
        ended = await transaction.rounds.finish(claimed.round.id, fence=fence, state=state, report=report)
        self._tell_watchers(transaction, ROUND_ENDED, ended, later=later)
        if ended.state is RoundState.CANCELLED:
            await self._cancel_calls(transaction, ended)
        return ended

    async def _start(
        self, transaction: Transaction, chat_key: str, fence: int, worker: str, *, later: bool = False
    ) -> ClaimedRound | None:
        claimed = await transaction.rounds.claim_next(chat_key, fence=fence, worker=worker)
        if claimed is not None:
            self._tell_watchers(transaction, ROUND_STARTED, claimed.round, later=later)
        return claimed

    async def _settle_orphans(self, transaction: Transaction, chat_key: str, fence: int) -> None:
        limit = self._max_attempts
        for orphan in await transaction.rounds.take_over(chat_key, fence=fence, max_attempts=limit):
            logger.bind(round_id=orphan.id, state=orphan.state.value).warning("round_taken_over")
            if orphan.state is RoundState.RUNNING:
                await self._end_interrupted(transaction, orphan, fence)
            elif orphan.state is RoundState.FAILED:
                self._tell_watchers(transaction, ROUND_ENDED, orphan)
                await self._explain_failure(transaction, orphan)
            elif orphan.state is RoundState.CANCELLED:
                self._tell_watchers(transaction, ROUND_ENDED, orphan)
                await self._cancel_calls(transaction, orphan)

    async def _end_interrupted(self, transaction: Transaction, orphan: Round, fence: int) -> None:
        """End a round whose worker died after the answer: its code may have run and is not run again.

        If an AGENT result has requested a follow-up round, nothing else is needed. Otherwise a
        follow-up round asks the model to check the state.
        """
        rows = await transaction.calls.of_round(orphan.id)
        stop = await _woken_by(transaction, rows)
        report = RoundReport(
            stop_type=int(StopType.ERROR if stop is None else stop),
            error=_interruption(rows) if stop is None else None,
            calls=told_calls([], rows),
        )
        ended = await transaction.rounds.finish(orphan.id, fence=fence, report=report)
        self._tell_watchers(transaction, ROUND_ENDED, ended)
        if stop is not None:
            return
        if ended.number < self._settings.rounds_per_turn:
            await self._request_follow_up(transaction, ended, user_id=ended.user_id)
            return
        notice = verdict.rounds_used_up(self._settings.rounds_per_turn).notice or ""
        await self._tell_chat(transaction, ended, notice, kind=MessageKind.ASSISTANT)

    async def _explain_failure(self, transaction: Transaction, ended: Round) -> None:
        notice = f"The agent could not answer: {ended.error}"
        await self._tell_chat(transaction, ended, notice, kind=MessageKind.SYSTEM)

    async def _cancel_calls(self, transaction: Transaction, ended: Round) -> None:
        # Calls that still run can no longer write; the revocation stops them too.
        calls = await transaction.calls.cancel_round(ended.id, reason="its round was stopped on request")
        for call in calls:
            if call.detached_at is not None:
                await end_job(transaction, call.id, JobState.CANCELLED, "its round was stopped on request")
        if calls:
            transaction.after_commit(lambda: self._publisher.revoke(*(call.id for call in calls)))

    async def _request_follow_up(
        self, transaction: Transaction, ended: Round, *, user_id: str | None
    ) -> None:
        await transaction.rounds.request(
            RoundRequest(
                chat_key=ended.chat_key,
                trigger_kind=TriggerKind.ROUND,
                trigger_id=ended.id,
                turn_id=ended.turn_id,
                number=ended.number + 1,
                user_id=user_id,
            )
        )

    async def _tell_chat(
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

    def _tell_watchers(
        self, transaction: Transaction, event: str, item: Round, *, later: bool = False
    ) -> None:
        body = {
            "id": item.id,
            "turn": item.turn_id,
            "number": item.number,
            "trigger": item.trigger_kind.value,
            "state": item.state.value,
            "stop_type": None if item.stop_type is None else StopType(item.stop_type).name,
            "worker": item.worker,
            "error": item.error,
        }

        async def tell() -> None:
            if event == ROUND_ENDED:
                _count(item)
            self._publisher.tell(event, item.chat_key, body, later=later)

        transaction.after_commit(tell)


def _count(ended: Round) -> None:
    stop_type = "none" if ended.stop_type is None else StopType(ended.stop_type).name
    metrics().rounds.labels(ended.state.value, stop_type).inc()
    if ended.started_at is not None and ended.finished_at is not None:
        metrics().round_seconds.observe((ended.finished_at - ended.started_at).total_seconds())


async def _woken_by(transaction: Transaction, rows: Sequence[Call]) -> StopType | None:
    """Return the stop type of an AGENT result that already has its follow-up round, else None."""
    for row in rows:
        is_result = row.state is CallState.DONE and row.type in STOPS
        if is_result and await transaction.rounds.find_by_trigger(TriggerKind.CALL, row.id) is not None:
            return STOPS[row.type]
    return None


def _interruption(rows: Sequence[Call]) -> str:
    fates = "".join(f" `{row.method.rpartition('.')[2]}`: {_fate(row.state)}." for row in rows)
    return (
        "The host that ran the program went down, perhaps in the middle of it; what it printed is lost. "
        f"What it did before may stand.{fates} Look at the chat before you repeat anything."
    )


def _fate(state: CallState) -> str:
    if state is CallState.DONE:
        return "done"
    if state in (CallState.QUEUED, CallState.RUNNING):
        return "still running"
    return "outcome unknown" if state is CallState.UNKNOWN else "failed"


def _calls(calls: Sequence[CallRecord]) -> list[dict[str, Any]]:
    return [call_json(record) for record in calls]


def _report(outcome: RoundOutcome, calls: Sequence[CallRecord]) -> RoundReport:
    llm, run = outcome.llm, outcome.run
    return RoundReport(
        prompt_chars=outcome.prompt_chars,
        model=llm.model if llm else None,
        answer=outcome.answer if llm else None,
        code=outcome.code if llm else None,
        stop_type=None if outcome.stop_type is None else int(outcome.stop_type),
        exit_code=run.exit_code if run else None,
        output=outcome.output,
        prompt_tokens=llm.prompt_tokens if llm else None,
        completion_tokens=llm.answer_tokens if llm else None,
        cost=llm.cost if llm else None,
        calls=_calls(calls),
        error=outcome.reason or None,
    )
