"""Draining a chat: one requested round at a time, in order, under the chat's lease.

Whoever holds the lease runs the oldest requested round and takes the younger ones along.
One drain runs one round and hands the chat back: chats share the workers fairly, and any
worker may take the next round.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

from loguru import logger

from agent.rounds import RoundAnswer, RoundOutcome, RoundRunner
from broker_config.settings import AgentSettings
from broker_config.tracing import span
from nekro_agent.errors import FencedError, NekroError, StorageError
from storage.engine import Database
from storage.rounds import ClaimedRound
from workers.chat_lease import ChatLease
from workers.dispatch import CallRecord
from workers.publisher import EventPublisher
from workers.round_input import RoundInputs
from workers.round_ledger import RoundLedger

__all__ = ["RoundDrain"]

#: How often a running round looks whether somebody asked it to stop.
CANCEL_POLL_SECONDS: Final = 0.3


class RoundDrain:
    """Runs the requested rounds of chats; one instance per rounds worker."""

    def __init__(
        self,
        *,
        database: Database,
        publisher: EventPublisher,
        ledger: RoundLedger,
        runner: RoundRunner,
        inputs: RoundInputs,
        settings: AgentSettings,
        owner: str,
    ) -> None:
        self._database = database
        self._publisher = publisher
        self._ledger = ledger
        self._runner = runner
        self._inputs = inputs
        self._settings = settings
        self._owner = owner
        self._delayed: dict[str, asyncio.Task[None]] = {}

    async def drain(self, chat_key: str) -> None:
        """Run the chat's next round, if it is due and nobody else holds the chat."""
        lease = await ChatLease.acquire(
            self._database, chat_key, owner=self._owner, lease_seconds=self._settings.lease_seconds
        )
        if lease is None:
            return  # its holder looks again after it gave the chat back
        try:
            with logger.contextualize(chat_key=chat_key):
                async with lease:
                    await self._run_next(lease)
        except FencedError:
            logger.bind(chat_key=chat_key, fence=lease.fence).warning("chat_lease_lost")
            return
        seconds = await self._ledger.announce_due(chat_key)
        if seconds is not None and chat_key not in self._delayed:
            # One per chat: the first of a burst is due first, and takes the others along.
            self._delayed[chat_key] = asyncio.create_task(self._announce_later(chat_key, seconds))

    async def close(self) -> None:
        """Forget announcements that wait for a debounce; the sweep makes them."""
        tasks = list(self._delayed.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _announce_later(self, chat_key: str, seconds: float) -> None:
        try:
            await asyncio.sleep(seconds)
        finally:
            del self._delayed[chat_key]
        await self._publisher.round_requested(chat_key)

    async def _run_next(self, lease: ChatLease) -> None:
        claimed = await self._ledger.start_next(lease.chat_key, fence=lease.fence, worker=self._owner)
        if claimed is not None:
            found = claimed.round
            ids: dict[str, str | int] = {
                "round_id": found.id,
                "turn_id": found.turn_id,
                "chat_key": found.chat_key,
                "number": found.number,
            }
            with logger.contextualize(round_id=found.id), span("round", ids):
                await self._carry_out(_Attempt(claimed, lease))

    async def _carry_out(self, attempt: _Attempt) -> None:
        work = asyncio.create_task(self._outcome(attempt))
        watch = asyncio.create_task(self._wait_for_stop(attempt))
        try:
            done, _ = await asyncio.wait([work, watch], return_when=asyncio.FIRST_COMPLETED)
            attempt.is_stopped = watch in done
        finally:
            if not work.done():
                work.cancel()
            watch.cancel()
            await asyncio.gather(work, watch, return_exceptions=True)
        await self._record_end(attempt, work)

    async def _record_end(self, attempt: _Attempt, work: asyncio.Task[RoundOutcome]) -> None:
        claimed, fence, calls = attempt.claimed, attempt.lease.fence, attempt.calls
        if attempt.lease.lost.is_set():
            raise FencedError(f"chat {claimed.round.chat_key!r} passed to another worker")
        if work.cancelled() and attempt.is_stopped:
            await self._ledger.stop(claimed, calls, fence=fence)
            return
        error = asyncio.CancelledError() if work.cancelled() else work.exception()
        if error is None:
            await self._ledger.finish(claimed, work.result(), calls, fence=fence)
        elif isinstance(error, FencedError):
            raise error
        elif isinstance(error, NekroError):
            await self._ledger.fail(claimed, error, calls, fence=fence)
        else:
            logger.opt(exception=error).error("round_failed_unexpectedly")
            internal = NekroError(f"internal error ({type(error).__name__}); see the worker's log")
            await self._ledger.fail(claimed, internal, calls, fence=fence)

    async def _outcome(self, attempt: _Attempt) -> RoundOutcome:
        claimed = attempt.claimed

        async def on_answer(answer: RoundAnswer) -> None:
            await self._ledger.answered(claimed, answer, fence=attempt.lease.fence)

        prepared = await self._inputs.build(
            claimed,
            attempt.lease,
            may_wake=not self._runner.is_last(claimed.round.number),
            on_answer=on_answer,
        )
        attempt.calls = prepared.calls
        return await self._runner.run(prepared.input)

    async def _wait_for_stop(self, attempt: _Attempt) -> None:
        """Return when the lease is lost or somebody asked the round to stop."""
        while not await self._is_over(attempt):
            try:
                async with asyncio.timeout(CANCEL_POLL_SECONDS):
                    await attempt.lease.lost.wait()
            except TimeoutError:
                pass

    async def _is_over(self, attempt: _Attempt) -> bool:
        if attempt.lease.lost.is_set():
            return True
        try:
            async with self._database.read() as transaction:
                return await transaction.rounds.is_cancel_requested(attempt.claimed.round.id)
        except StorageError as exc:  # a round must not end because of the look at it
            logger.bind(error=str(exc)).warning("stop_request_not_readable")
            return False


class _Attempt:
    """One attempt at one round, and the calls it has made by now."""

    def __init__(self, claimed: ClaimedRound, lease: ChatLease) -> None:
        self.claimed = claimed
        self.lease = lease
        #: Whether somebody asked it to stop, or the lease was lost.
        self.is_stopped = False
        self.calls: Sequence[CallRecord] = ()
