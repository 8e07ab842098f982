"""Drains a chat: runs its requested rounds one at a time, in order, under the chat's lease.

An announcement says that a chat has a requested round. The worker that takes it drains the chat that is next
in the fair order of all waiting rounds (``storage.repositories.rounds``), which is another one while the
workers are behind: each announcement starts one chat, so their order does not matter.

The holder of the lease runs the oldest requested round and merges younger ones into it. A drain
continues with the chat's next round while its worker has a slot free for another chat; otherwise
it releases the chat after each round, so chats share the workers fairly and any worker may run the
next round. One poll finds the requests to stop all rounds that run in this process.

Every write of a round names the lease's fencing token, so the database refuses a worker that lost the
chat. Calls of methods are preceded by ``HeldLease.ensure``, so a worker that was suspended notices the
loss before it acts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from loguru import logger

from broker_config.settings import AgentSettings
from nekro.agent.llm import LLMAnswer
from nekro.agent.rounds import RoundOutcome, RoundRunner
from nekro.app.calls.run_calls import CallRecord
from nekro.app.chats.publisher import EventPublisher
from nekro.app.chats.writer import trace_of
from nekro.app.leases import CHAT, HeldLease, LeaseKeeper, on_this_loop
from nekro.app.model_meters import RoundBudgets, RoundMeter
from nekro.base.tasks import end_tasks, log_errors
from nekro.broker.tracing import span
from nekro_agent.durations import REFRESH_SECONDS
from nekro_agent.errors import BrokerError, FencedError, NekroError, StorageUnavailableError
from nekro_agent.execution.current import on_account
from nekro_agent.shared_clock import elapsed_seconds
from storage.engine import Database
from storage.repositories.parked_programs import ParkedProgram
from storage.repositories.rounds import ClaimedRound, RoundReport
from workers.rounds.attempt_events import AttemptEvents
from workers.rounds.chat_view import ChatView
from workers.rounds.input import PreparedRound, RoundInputs
from workers.rounds.ledger import RoundLedger

__all__ = [
    "RoundDrain",
    "StopRequests",
]


class StopRequests:
    """Polls while at least one round is watched; use it on one event loop."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._watched: dict[str, asyncio.Future[None]] = {}
        self._task: asyncio.Task[None] | None = None

    @contextmanager
    def watch(self, round_id: str) -> Iterator[asyncio.Future[None]]:
        """Return a future for the length of a block; it is done when the round is asked to stop."""
        asked = self._watched[round_id] = asyncio.get_running_loop().create_future()
        if self._task is None:
            self._task = asyncio.create_task(self._look_repeatedly(), name="nekro-stop-requests")
        try:
            yield asked
        finally:
            del self._watched[round_id]

    async def _look_repeatedly(self) -> None:
        try:
            await asyncio.sleep(REFRESH_SECONDS)
            while self._watched:
                # An error of the query must not end a round.
                with log_errors("stop_request_not_readable"):
                    await self._look()
                await asyncio.sleep(REFRESH_SECONDS)
        finally:
            self._task = None

    async def _look(self) -> None:
        async with self._database.read() as transaction:
            asked = await transaction.rounds.cancel_requested(list(self._watched))
        for round_id in asked & self._watched.keys():
            _complete(self._watched[round_id])


class RoundDrain:
    """Runs the requested rounds of chats; one instance per rounds worker."""

    def __init__(
        self,
        *,
        database: Database,
        leases: LeaseKeeper,
        publisher: EventPublisher,
        ledger: RoundLedger,
        runner: RoundRunner,
        inputs: RoundInputs,
        budgets: RoundBudgets,
        settings: AgentSettings,
        owner: str,
        slots: int = 1,
        is_stopping: Callable[[], bool] = lambda: False,
        redact: Callable[[str], str] = str,
        on_rest: Callable[[str], object] = lambda chat_key: None,
        leaving: Callable[[str], AbstractContextManager[None]] = lambda chat_key: nullcontext(),
        program_ended: Callable[[str, str], object] = lambda chat_key, program_id: None,
    ) -> None:
        """Create the drain.

        Args:
            leaving: lets the calls of a chat run on whose program is stopped in the block.
            program_ended: called with a chat and a program whose marks are not needed; must not block.
            slots: number of drains that this process runs concurrently; the drain that takes the last
                slot releases its chat after each round.
            is_stopping: whether this process is stopping; then every drain releases its chat.
            redact: removes secrets and host paths from arguments and results in events, and from prompts.
            on_rest: called with a chat that was released; must not block or raise.
        """
        self._database = database
        self._leases = leases
        self._publisher = publisher
        self._ledger = ledger
        self._runner = runner
        self._inputs = inputs
        self._budgets = budgets
        self._settings = settings
        self._owner = owner
        self._slots = slots
        self._is_stopping = is_stopping
        self._redact = redact
        self._on_rest = on_rest
        self._leaving = leaving
        self._program_ended = program_ended
        self._stop_requests = StopRequests(database)
        self._running = 0
        self._delayed: dict[str, asyncio.Task[None]] = {}

    async def drain(self, announced: str) -> None:
        """Run the next round of the chat that is next, if one is due that no other process runs.

        The rounds after it follow at once, at most ``rounds_per_turn`` in all, while a slot is free.

        Args:
            announced: the chat that was announced.
        """
        self._running += 1
        try:
            drained = await self._drain_next(announced)
        finally:
            self._running -= 1
        if drained != announced:
            seconds = await self._ledger.endings.seconds_until_due(announced)
            if seconds:  # if it is due, another announcement or the chat's holder starts it
                self._announce_soon(announced, seconds)

    async def _drain_next(self, announced: str) -> str | None:
        """Drain the next chat that has a round to run; returns its key, None if no chat has one."""
        while True:
            lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            since = elapsed_seconds()
            async with self._database.autocommit() as transaction:
                taken = await transaction.chats.acquire_next(
                    announced, owner=self._owner, lease_seconds=self._settings.lease_seconds
                )
            if taken is None:
                return None
            chat_key, fence = taken
            lease = self._leases.hold(
                CHAT,
                chat_key,
                fence,
                seconds=self._settings.lease_seconds,
                since=since,
                limit_seconds=self._settings.turn_seconds,  # a worker whose event loop hangs loses the chat
                on_lost=on_this_loop(partial(_complete, lost)),
            )
            # Without a round, another process has run it since this one looked; a chat may still wait.
            if await self._drain(lease, lost):
                return chat_key

    async def _drain(self, lease: HeldLease, lost: asyncio.Future[None]) -> bool:
        """Run the rounds of a chat under its lease; returns whether it had one."""
        chat_key, has_run = lease.key, True
        try:
            with logger.contextualize(chat_key=chat_key):
                async with lease:
                    has_run = await self._run_rounds(lease, lost)
        except FencedError:
            logger.bind(chat_key=chat_key, fence=lease.fence).warning("chat_lease_lost")
        except StorageUnavailableError as exc:
            # The round stays as after a worker's death: restarted, or ended if its code may have run.
            logger.bind(chat_key=chat_key, error=str(exc)).warning("round_interrupted")
        self._on_rest(chat_key)
        # Also after a lost lease: a round that was requested meanwhile could not be started.
        seconds = await self._ledger.endings.announce_due(chat_key)
        if seconds is not None:
            self._announce_soon(chat_key, seconds)
        return has_run

    def _announce_soon(self, chat_key: str, seconds: float) -> None:
        # One task per chat: the first round of a burst is due first and merges the others.
        if chat_key not in self._delayed:
            self._delayed[chat_key] = asyncio.create_task(self._announce_later(chat_key, seconds))

    async def close(self) -> None:
        """Cancel announcements that wait for a debounce; the sweep announces those rounds."""
        await end_tasks(*self._delayed.values())

    async def _announce_later(self, chat_key: str, seconds: float) -> None:
        try:
            await asyncio.sleep(seconds)
        finally:
            del self._delayed[chat_key]
        await self._publisher.round_requested(chat_key)

    async def _run_rounds(self, lease: HeldLease, lost: asyncio.Future[None]) -> bool:
        """Run rounds until none is due or another worker may go on; returns whether one was due."""
        claimed = await self._ledger.start_next(lease.key, fence=lease.fence, worker=self._owner)
        view = ChatView(
            lease.key,
            most_messages=self._settings.history_messages,
            shows_summary=self._settings.summary_group is not None,
        )
        left = self._settings.rounds_per_turn
        has_run = claimed is not None
        while claimed is not None:
            left -= 1
            await lease.ensure()
            events = AttemptEvents(
                self._database,
                self._publisher,
                claimed.round,
                fence=lease.fence,
                keeps_prompts=self._settings.keep_prompts,
                redact=self._redact,
            )
            attempt = _Attempt(
                claimed=claimed, lease=lease, lost=lost, view=view, is_last=left <= 0, events=events
            )
            try:
                claimed = await self._run(attempt)
            except asyncio.CancelledError:  # this worker stops; the round does not count it as dead
                with suppress(NekroError):
                    async with self._database.autocommit() as transaction:
                        await transaction.rounds.hand_on(attempt.claimed.round.id, fence=lease.fence)
                    if attempt.meter is not None:
                        await attempt.meter.interrupted()
                raise
            finally:
                await events.close()
        return has_run

    async def _run(self, attempt: _Attempt) -> ClaimedRound | None:
        """Run a round; returns the next round, already started, if the drain continues with it."""
        found = attempt.claimed.round
        ids: dict[str, str | int] = {
            "round_id": found.id,
            "turn_id": found.turn_id,
            "chat_key": found.chat_key,
            "number": found.number,
            "attempt": found.attempt,
        }
        others = {item.turn_id: item for item in attempt.claimed.merged if item.turn_id != found.turn_id}
        links = [trace_of(item) for item in others.values()]
        with (
            logger.contextualize(round_id=found.id),
            on_account(found.turn_id),
            span("round", ids, turn=trace_of(found), links=links),
        ):
            return await self._carry_out(attempt)

    async def _carry_out(self, attempt: _Attempt) -> ClaimedRound | None:
        work = asyncio.create_task(self._outcome(attempt))
        chat_key, round_id, is_asked = attempt.lease.key, attempt.claimed.round.id, False
        with self._stop_requests.watch(round_id) as asked:
            try:
                ends: list[asyncio.Future[Any]] = [work, asked, attempt.lost]
                done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
                is_asked = asked in done
                attempt.is_stopped = is_asked or attempt.lost in done
            finally:
                # Who has the chat next runs the program again, unless it was asked to stop.
                with nullcontext() if is_asked else self._leaving(chat_key):
                    await end_tasks(work)
        following = await self._record_end(attempt, work)
        if attempt.prepared is not None and attempt.calls and not attempt.needs_marks:
            self._program_ended(chat_key, attempt.prepared.program_id)
        if attempt.prepared is not None and attempt.prepared.run.parks_at is None:
            await self._runner.forget(attempt.prepared.input)
        return following

    async def _record_end(self, attempt: _Attempt, work: asyncio.Task[RoundOutcome]) -> ClaimedRound | None:
        claimed, fence, calls = attempt.claimed, attempt.lease.fence, attempt.calls
        if attempt.lease.is_lost:
            raise FencedError(f"chat {claimed.round.chat_key!r} passed to another worker")
        if work.cancelled() and attempt.is_stopped:
            await self._ledger.stop(claimed, calls, attempt.events, fence=fence, meter=attempt.meter)
            return None
        error = asyncio.CancelledError() if work.cancelled() else work.exception()
        if error is None:
            worker = self._owner if self._goes_on(attempt) else None
            parked = await self._parked(attempt)
            outcome = work.result()
            if attempt.prepared is not None:
                last = "" if outcome.run is None else outcome.run.readings
                readings = attempt.prepared.run.all_readings(last)
                outcome = replace(outcome, report=replace(outcome.report, readings=readings))
            ended, following = await self._ledger.finish(
                claimed,
                outcome,
                calls,
                attempt.events,
                fence=fence,
                next_worker=worker,
                meter=attempt.meter,
                earlier=attempt.view.earlier,
                parked=parked,
            )
            attempt.view.round_ended(ended, calls)
            return following
        if isinstance(error, FencedError | StorageUnavailableError):
            raise error
        if isinstance(error, NekroError):
            await self._ledger.fail(claimed, error, calls, attempt.events, fence=fence, meter=attempt.meter)
        else:
            logger.opt(exception=error).error("round_failed_unexpectedly")
            internal = NekroError(f"internal error ({type(error).__name__}); see the worker's log")
            await self._ledger.fail(
                claimed, internal, calls, attempt.events, fence=fence, meter=attempt.meter
            )
        return None

    async def _parked(self, attempt: _Attempt) -> ParkedProgram | None:
        if attempt.prepared is None or attempt.prepared.run.parks_at is None:
            return None
        await self._runner.note_ends(attempt.prepared.input)
        try:
            return await attempt.prepared.to_park()
        except BrokerError as exc:  # a repetition reads them there, or makes the calls again
            logger.bind(error=str(exc)).warning("results_not_kept")
            attempt.needs_marks = True
            return attempt.prepared.without_results()

    def _goes_on(self, attempt: _Attempt) -> bool:
        """Whether the drain may continue with the chat's next round: a slot is free for another chat."""
        return not attempt.is_last and self._running < self._slots and not self._is_stopping()

    async def _outcome(self, attempt: _Attempt) -> RoundOutcome:
        claimed = attempt.claimed

        async def on_answer(report: RoundReport, llm: LLMAnswer) -> None:
            await self._ledger.answered(claimed, report, llm, attempt.events, fence=attempt.lease.fence)
            if attempt.meter is not None:
                attempt.meter.answered(llm)

        prepared = await self._inputs.build(
            claimed,
            attempt.lease,
            attempt.view,
            may_wake=not self._runner.is_last(claimed.round.number),
            on_answer=on_answer,
            events=attempt.events,
        )
        attempt.prepared, attempt.calls = prepared, prepared.run.records
        attempt.meter = self._budgets.meter(
            claimed, prepared.chat, key=prepared.key, waking_method=prepared.waking_method
        )
        return await self._runner.run(replace(prepared.input, budget=attempt.meter))


def _complete(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


@dataclass(kw_only=True)
class _Attempt:
    """One attempt at one round, and the calls that it has made so far."""

    claimed: ClaimedRound
    #: The chat's lease, and a future that is done when it is lost.
    lease: HeldLease
    lost: asyncio.Future[None]
    view: ChatView
    #: Receives what happens in it.
    events: AttemptEvents
    #: Whether the drain releases the chat after it.
    is_last: bool
    #: Whether a stop was requested or the lease was lost.
    is_stopped: bool = False
    calls: Sequence[CallRecord] = ()
    #: Its input; None before it has it.
    prepared: PreparedRound | None = None
    #: Whether its program waits, and the results of its calls are in the broker only.
    needs_marks: bool = False
    #: What it spends; None before it has its input.
    meter: RoundMeter | None = None
