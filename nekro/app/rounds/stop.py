"""Stops the rounds of a chat: waiting rounds are cancelled, the running one is ended.

The request is a row, so it reaches the worker that runs the round wherever that worker is; a
request that comes too late has no effect. A round whose worker is dead is ended by this process.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

from loguru import logger

from nekro.app.leases import CHAT, LeaseKeeper
from nekro.app.rounds.endings import RoundEndings
from nekro_agent.durations import POLL_SECONDS
from nekro_agent.errors import FencedError
from storage.repositories.rounds import Round
from storage.states import FINAL_ROUND_STATES, RoundState

__all__ = ["RoundStopper", "StoppedRounds"]


@dataclass(frozen=True, kw_only=True)
class StoppedRounds:
    """The rounds that a request to stop found."""

    #: Rounds that waited and will not start.
    cancelled: tuple[Round, ...]
    #: Rounds that ran and have ended: as CANCELLED, unless they ended before they saw the request.
    stopped: tuple[Round, ...]
    #: Rounds that ran and whose workers have not confirmed their end.
    still_running: tuple[Round, ...]
    #: Calls that waited for approval, or in which programs waited; they are withdrawn.
    waits: tuple[str, ...]


class RoundStopper:
    """Stops rounds of chats from any process."""

    def __init__(self, leases: LeaseKeeper, endings: RoundEndings, *, owner: str) -> None:
        """Create the stopper.

        Args:
            owner: name of this process in the leases that it takes.
        """
        self._database = leases.database
        self._leases = leases
        self._endings = endings
        self._owner = owner

    async def stop(
        self, chat_key: str, *, reason: str, wait_seconds: float, turn_id: str | None = None
    ) -> StoppedRounds:
        """Stop the waiting and running rounds of a chat, and wait until they have stopped.

        Args:
            turn_id: only those of one turn; None means all.

        Raises:
            NotFoundError: there is no such chat.
        """
        found, waits = await self._endings.cancel(chat_key, reason=reason, turn_id=turn_id)
        running = [item for item in found if item.state is RoundState.RUNNING]
        deadline = time.monotonic() + wait_seconds
        while running and time.monotonic() < deadline:
            await self._settle(chat_key)
            running = await self._refreshed(running)
            if all(item.state in FINAL_ROUND_STATES for item in running):
                break
            await asyncio.sleep(POLL_SECONDS)
        return StoppedRounds(
            cancelled=tuple(item for item in found if item.state is RoundState.CANCELLED),
            stopped=tuple(item for item in running if item.state in FINAL_ROUND_STATES),
            still_running=tuple(item for item in running if item.state not in FINAL_ROUND_STATES),
            waits=tuple(waits),
        )

    async def _settle(self, chat_key: str) -> None:
        """End a round whose worker is dead, if the chat's lease is free."""
        lease = await self._leases.acquire(
            CHAT, chat_key, owner=self._owner, seconds=self._endings.lease_seconds
        )
        if lease is None:
            return
        try:
            async with lease:
                await self._endings.settle_orphans(chat_key, fence=lease.fence)
        except FencedError:  # this process was suspended meanwhile, and another one took over
            logger.bind(chat_key=chat_key).warning("chat_lease_lost")
        await self._endings.announce_due(chat_key)

    async def _refreshed(self, rounds: list[Round]) -> list[Round]:
        async with self._database.read() as transaction:
            return [await transaction.rounds.get(item.id) for item in rounds]
