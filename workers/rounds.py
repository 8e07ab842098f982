"""Draining a chat: one requested round at a time, in order, under the chat's lease.

Whoever holds the lease runs the oldest requested round and takes the younger ones along.
Every write names the lease's fencing token, so a worker that froze and thaws writes nothing.
One drain runs one round and hands the chat back: chats share the workers fairly, and any
worker may take the next round.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from loguru import logger

from agent.rounds import RoundOutcome, RoundRunner
from broker_config.redaction import Redactor
from broker_config.settings import AgentSettings
from nekro_agent.errors import FencedError, NekroError, StorageUnavailableError
from nekro_agent.ports import MessageKind
from sandbox.models import StopType
from storage.calls import CallRepository
from storage.chats import ChatRepository
from storage.engine import Database
from storage.messages import MessageRepository, NewMessage
from storage.rounds import ClaimedRound, RoundReport, RoundRepository, RoundRequest
from storage.states import RoundState, TriggerKind
from storage.transaction import Transaction
from workers.messages import announce_message
from workers.publisher import EventPublisher
from workers.round_input import RoundInputs

__all__ = ["RoundDrain"]

#: How often a round is started before it is given up: its worker died each time.
MAX_ATTEMPTS: Final = 3
#: How often a running round looks whether somebody asked it to stop.
CANCEL_POLL_SECONDS: Final = 0.5

#: Stop types whose follow-up round was scheduled by the worker that ran the method.
_WOKEN_BY_CALL: Final = (StopType.AGENT, StopType.MULTIMODAL_AGENT)


class RoundDrain:
    """Runs the requested rounds of chats; one instance per rounds worker."""

    def __init__(
        self,
        *,
        database: Database,
        publisher: EventPublisher,
        runner: RoundRunner,
        inputs: RoundInputs,
        redactor: Redactor,
        settings: AgentSettings,
        owner: str,
    ) -> None:
        self._database = database
        self._publisher = publisher
        self._runner = runner
        self._inputs = inputs
        self._redactor = redactor
        self._settings = settings
        self._owner = owner
        self._delayed: set[asyncio.Task[None]] = set()

    async def drain(self, chat_key: str) -> None:
        """Run the chat's next round, if it is due and nobody else holds the chat."""
        async with self._database.autocommit() as transaction:
            fence = await ChatRepository(transaction.connection).acquire_lease(
                chat_key, owner=self._owner, lease_seconds=self._settings.lease_seconds
            )
        if fence is None:
            return  # its holder looks again after the release below
        try:
            with logger.contextualize(chat_key=chat_key):
                await self._run_next(chat_key, fence)
        except FencedError:
            logger.bind(chat_key=chat_key, fence=fence).warning("chat_lease_lost")
            return
        finally:
            await self._release(chat_key, fence)
        await self._announce_rest(chat_key)

    async def close(self) -> None:
        """Forget announcements that wait for a debounce; the sweep makes them."""
        for task in self._delayed:
            task.cancel()
        await asyncio.gather(*self._delayed, return_exceptions=True)

    async def _release(self, chat_key: str, fence: int) -> None:
        try:
            async with self._database.autocommit() as transaction:
                await ChatRepository(transaction.connection).release_lease(chat_key, fence=fence)
        except StorageUnavailableError as exc:  # the lease runs out by itself
            logger.bind(chat_key=chat_key, error=str(exc)).warning("chat_lease_not_released")

    async def _announce_rest(self, chat_key: str) -> None:
        # After the release, not before: a trigger that came while the lease was held found it held,
        # and this look is what sees its row.
        async with self._database.read() as transaction:
            seconds = await RoundRepository(transaction.connection).seconds_until_due(chat_key)
        if seconds is None:
            return
        if seconds <= 0:
            await self._publisher.round_requested(chat_key)
            return
        task = asyncio.create_task(self._announce_later(chat_key, seconds))
        self._delayed.add(task)
        task.add_done_callback(self._delayed.discard)

    async def _announce_later(self, chat_key: str, seconds: float) -> None:
        await asyncio.sleep(seconds)
        await self._publisher.round_requested(chat_key)

    async def _run_next(self, chat_key: str, fence: int) -> None:
        async with self._database.begin() as transaction:
            rounds = RoundRepository(transaction.connection)
            await rounds.take_over(chat_key, fence=fence, max_attempts=MAX_ATTEMPTS)
            claimed = await rounds.claim_next(chat_key, fence=fence, worker=self._owner)
        if claimed is None:
            return
        with logger.contextualize(round_id=claimed.round.id):
            async with self._lease_kept(chat_key, fence) as stopping:
                await self._carry_out(claimed, fence, stopping)

    @asynccontextmanager
    async def _lease_kept(self, chat_key: str, fence: int) -> AsyncIterator[asyncio.Event]:
        """Renew the lease for the block; the event is set when it passed to somebody else."""
        lost = asyncio.Event()
        keeper = asyncio.create_task(self._keep_lease(chat_key, fence, lost))
        try:
            yield lost
        finally:
            keeper.cancel()
            await asyncio.gather(keeper, return_exceptions=True)

    async def _keep_lease(self, chat_key: str, fence: int, lost: asyncio.Event) -> None:
        seconds = self._settings.lease_seconds
        while True:
            await asyncio.sleep(seconds / 3)
            try:
                async with self._database.autocommit() as transaction:
                    kept = await ChatRepository(transaction.connection).renew_lease(
                        chat_key, fence=fence, lease_seconds=seconds
                    )
            except StorageUnavailableError as exc:
                logger.bind(error=str(exc)).warning("chat_lease_not_renewed")
                continue
            if not kept:
                lost.set()
                return

    async def _carry_out(self, claimed: ClaimedRound, fence: int, lost: asyncio.Event) -> None:
        work = asyncio.create_task(self._outcome(claimed))
        watch = asyncio.create_task(self._wait_for_stop(claimed.round.id, lost))
        try:
            await asyncio.wait([work, watch], return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not work.done():
                work.cancel()
            watch.cancel()
            await asyncio.gather(work, watch, return_exceptions=True)
        if lost.is_set():
            raise FencedError(f"the lease on chat {claimed.round.chat_key!r} passed to another worker")
        if work.cancelled():
            await self._finish_stopped(claimed, fence)
            return
        error = work.exception()
        if error is None:
            await self._finish(claimed, fence, work.result())
        elif isinstance(error, NekroError):
            await self._finish_failed(claimed, fence, error)
        else:
            logger.opt(exception=error).error("round_failed_unexpectedly")
            await self._finish_failed(
                claimed, fence, NekroError(f"internal error ({type(error).__name__}); see the worker's log")
            )

    async def _outcome(self, claimed: ClaimedRound) -> RoundOutcome:
        round_input = await self._inputs.build(
            claimed, may_wake=not self._runner.is_last(claimed.round.number)
        )
        return await self._runner.run(round_input)

    async def _wait_for_stop(self, round_id: str, lost: asyncio.Event) -> None:
        """Return when the lease is lost or somebody asked the round to stop."""
        while not lost.is_set():
            try:
                async with asyncio.timeout(CANCEL_POLL_SECONDS):
                    await lost.wait()
            except TimeoutError:
                async with self._database.read() as transaction:
                    if await RoundRepository(transaction.connection).is_cancel_requested(round_id):
                        return

    async def _finish(self, claimed: ClaimedRound, fence: int, outcome: RoundOutcome) -> None:
        round_ = claimed.round
        async with self._database.begin() as transaction:
            await RoundRepository(transaction.connection).finish(
                round_.id, fence=fence, report=_report(outcome)
            )
            if outcome.notice is not None:
                await self._tell(transaction, claimed, outcome.notice, kind=MessageKind.ASSISTANT)
            if outcome.needs_follow_up and outcome.stop_type not in _WOKEN_BY_CALL:
                await RoundRepository(transaction.connection).request(
                    RoundRequest(
                        chat_key=round_.chat_key,
                        trigger_kind=TriggerKind.ROUND,
                        trigger_id=round_.id,
                        turn_id=round_.turn_id,
                        number=round_.number + 1,
                        user_id=round_.user_id,
                    )
                )
        logger.bind(
            number=round_.number, stop_type=None if outcome.stop_type is None else outcome.stop_type.name
        ).info("round_done")

    async def _finish_failed(self, claimed: ClaimedRound, fence: int, error: NekroError) -> None:
        text = self._redactor(str(error))
        async with self._database.begin() as transaction:
            await RoundRepository(transaction.connection).finish(
                claimed.round.id, fence=fence, state=RoundState.FAILED, report=RoundReport(error=text)
            )
            notice = f"The agent could not answer: {text}"
            await self._tell(transaction, claimed, notice, kind=MessageKind.SYSTEM)
        logger.bind(error=text, error_type=type(error).__name__).error("round_failed")

    async def _finish_stopped(self, claimed: ClaimedRound, fence: int) -> None:
        async with self._database.begin() as transaction:
            await RoundRepository(transaction.connection).finish(
                claimed.round.id,
                fence=fence,
                state=RoundState.CANCELLED,
                report=RoundReport(error="stopped on request"),
            )
            await CallRepository(transaction.connection).cancel_round(
                claimed.round.id, reason="its round was stopped on request"
            )
        logger.info("round_cancelled")

    async def _tell(
        self, transaction: Transaction, claimed: ClaimedRound, text: str, *, kind: MessageKind
    ) -> None:
        message, _ = await MessageRepository(transaction.connection).append_once(
            NewMessage(
                chat_key=claimed.round.chat_key,
                kind=kind,
                text=text,
                round_id=claimed.round.id,
                once_key=f"notice:{claimed.round.id}",
            )
        )
        announce_message(transaction, self._publisher, message)


def _report(outcome: RoundOutcome) -> RoundReport:
    llm, run = outcome.llm, outcome.run
    return RoundReport(
        prompt_chars=outcome.prompt_chars,
        model=llm.model if llm else None,
        answer=outcome.answer,
        code=outcome.code,
        stop_type=None if outcome.stop_type is None else int(outcome.stop_type),
        exit_code=run.exit_code if run else None,
        output=outcome.output,
        prompt_tokens=llm.prompt_tokens if llm else None,
        completion_tokens=llm.answer_tokens if llm else None,
        cost=llm.cost if llm else None,
        error=outcome.reason or None,
    )
