"""Read a chat's messages and rounds, and wait until no round or job of it is open."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Final

from nekro_agent.durations import POLL_SECONDS
from nekro_agent.errors import LLMError, ServiceError

if TYPE_CHECKING:
    from broker_config.settings import Settings
    from storage.engine import Database
    from storage.repositories.jobs import Job
    from storage.repositories.rounds import Round

__all__ = [
    "newest_rounds",
    "require_model",
    "require_success",
    "wait_for_jobs",
    "wait_for_quiet",
]

#: Number of newest rounds that are checked: open rounds are always among the newest of a chat.
_LOOK_BACK: Final = 50


async def newest_rounds(database: Database, chat_key: str, *, limit: int) -> list[Round]:
    """Return the newest rounds of a chat, the oldest of them first."""
    from storage.repositories.rounds import RoundRepository

    async with database.read() as transaction:
        return await RoundRepository(transaction.connection).newest(chat_key, limit=limit)


async def require_success(
    database: Database, *, message_id: str | None = None, round_id: str | None = None
) -> None:
    """Return when the turn of a round, or the one that a message caused if any, has ended well.

    Raises:
        LLMError: the turn failed or was cancelled; the message says why.
    """
    from storage.states import RoundState, TriggerKind

    async with database.read() as transaction:
        rounds = transaction.rounds
        if message_id is not None:
            first = await rounds.find_by_trigger(TriggerKind.MESSAGE, message_id)
        else:
            first = await rounds.get(str(round_id))
        if first is not None and first.merged_into is not None:
            first = await rounds.get(first.merged_into)
        turn = [] if first is None else await rounds.rounds_of_turns(first.turn_id)
    ended = [entry for entry in turn if entry.merged_into is None]
    if ended and ended[-1].state in (RoundState.FAILED, RoundState.CANCELLED):
        last = ended[-1]
        verb = "failed" if last.state is RoundState.FAILED else "was cancelled"
        raise LLMError(f"the turn {verb} in round {last.number}: {last.error or 'no reason is recorded'}")


def require_model(settings: Settings) -> None:
    """Return when a language model for rounds is configured.

    Raises:
        LLMError: none is configured; the message names the settings.
    """
    from nekro.agent.llm.clients import create_client

    create_client(settings.llm)


async def _open_rounds(database: Database, chat_key: str) -> list[Round]:
    from storage.states import FINAL_ROUND_STATES

    rounds = await newest_rounds(database, chat_key, limit=_LOOK_BACK)
    return [entry for entry in rounds if entry.state not in FINAL_ROUND_STATES]


async def wait_for_quiet(database: Database, chat_key: str, *, seconds: float) -> None:
    """Return when no round of the chat waits or runs.

    Raises:
        ServiceError: one still does after ``seconds``; the message names it.
    """
    deadline = time.monotonic() + seconds
    while True:
        active = await _open_rounds(database, chat_key)
        if not active:
            return
        if time.monotonic() > deadline:
            first = active[0]
            raise ServiceError(
                f"chat {chat_key}: round {first.number} is still {first.state} after {seconds:.0f} s"
                + (f" on {first.worker}" if first.worker else "; does a worker serve lane rounds?")
            )
        await asyncio.sleep(POLL_SECONDS)


async def wait_for_jobs(database: Database, chat_key: str, *, seconds: float) -> list[Job]:
    """Wait until no background job and no detached call of the chat runs; returns those that were open.

    Raises:
        ServiceError: one still does after ``seconds``; the message names it.
    """
    deadline = time.monotonic() + seconds
    seen: set[str] = set()
    while True:
        async with database.read() as transaction:
            open_jobs = await transaction.jobs.newest(limit=_LOOK_BACK, chat_key=chat_key, open_only=True)
            if not open_jobs:
                return [await transaction.jobs.get(job_id) for job_id in sorted(seen)]
        seen |= {job.id for job in open_jobs}
        if time.monotonic() > deadline:
            job = open_jobs[0]
            raise ServiceError(
                f"chat {chat_key}: job {job.id} ({job.type}) is still {job.state} after {seconds:.0f} s; "
                "`nekro jobs` shows it"
            )
        await asyncio.sleep(POLL_SECONDS)
