"""`nekro timers` on a real database, without a running system."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta

import pytest
from nekro_shell import Shell, open_shell

from broker_config.settings import DatabaseSettings
from nekro.cli.running import ExitCode
from nekro_agent.ports import CronJob, WorkdayMode
from storage.engine import Database
from storage.transaction import Transaction

FUTURE = datetime(2100, 1, 2, 3, 4, tzinfo=UTC)


@asynccontextmanager
async def transaction_of(shell: Shell) -> AsyncIterator[Transaction]:
    database = Database(DatabaseSettings(url=shell.environment["NEKRO_DATABASE__URL"]), shell.data_dir)
    async with database.begin() as transaction:
        yield transaction
    await database.dispose()


def add(shell: Shell, chat: str, *, job: str) -> str:
    """Add a one-time and a recurring timer; returns the id of the first."""

    async def fill() -> str:
        async with transaction_of(shell) as tx:
            await tx.chats.ensure(chat)
            timer = await tx.timers.add(chat, fire_at=FUTURE, description="water the plants")
            await tx.cron_jobs.add(
                CronJob(
                    job_id=job,
                    chat_key=chat,
                    cron_expr="0 8 * * *",
                    timezone="Asia/Tokyo",
                    workday_mode=WorkdayMode.NONE,
                    title="news",
                    event_desc="tell the news",
                    next_fire_at=FUTURE,
                    last_fired_at=None,
                    created_at=datetime.now(UTC),
                    updated_at=datetime.now(UTC),
                )
            )
            return timer.id

    return asyncio.run(fill())


@pytest.fixture(scope="module", params=["sqlite", "postgres"])
def shell(request: pytest.FixtureRequest) -> Iterator[Shell]:
    with open_shell({}) as shell:
        url = f"sqlite:///{shell.directory}/own.db"
        if request.param == "postgres":
            url = request.getfixturevalue("postgres_server").create_database()
        shell.environment["NEKRO_DATABASE__URL"] = url
        assert shell.inside("db", "upgrade").code == 0
        yield shell


def test_timers_of_both_kinds_are_listed(shell: Shell) -> None:
    once = add(shell, "listed", job="abcd")
    done = shell.inside("timers", "--chat-key", "listed", "--json")
    assert done.code == 0
    fields = ("id", "kind", "chat_key", "state", "description", "schedule")
    assert [tuple(timer[name] for name in fields) for timer in done.value] == [
        (once, "once", "listed", "waiting", "water the plants", None),
        ("abcd", "recurring", "listed", "waiting", "tell the news", "0 8 * * *"),
    ]
    assert datetime.fromisoformat(done.value[0]["fires_at"]) == FUTURE
    table = shell.inside("timers").out
    assert "2100-01-02 03:04:00 UTC" in table and "0 8 * * * Asia/Tokyo" in table
    assert shell.inside("timers", "--chat-key", "nobody", "--json").value == []


@pytest.mark.extended
def test_a_timer_is_paused_resumed_and_deleted_by_the_beginning_of_its_id(shell: Shell) -> None:
    once = add(shell, "changed", job="efgh")
    for timer, fires_again in ((once[:12], FUTURE), ("efgh", None)):
        paused = shell.inside("timers", "pause", timer, "--json")
        assert (paused.code, paused.value["state"]) == (0, "paused")
        assert shell.inside("timers", "pause", timer, "--json").value["state"] == "paused"
        resumed = shell.inside("timers", "resume", timer, "--json").value
        assert resumed["state"] == "waiting"
        fires_at = datetime.fromisoformat(resumed["fires_at"])
        if fires_again is not None:
            assert fires_at == fires_again
        else:
            assert datetime.now(UTC) - timedelta(days=1) < fires_at < datetime.now(UTC) + timedelta(days=2)
        deleted = shell.inside("timers", "delete", timer)
        assert (deleted.code, "deleted timer" in deleted.err) == (0, True)
        assert shell.inside("timers", "resume", timer).code == ExitCode.STORAGE
    assert shell.inside("timers", "--chat-key", "changed", "--json").value == []


def test_an_ambiguous_or_unknown_id_is_refused(shell: Shell) -> None:
    add(shell, "twins", job="twin1")
    add(shell, "twins", job="twin2")
    both = shell.inside("timers", "delete", "twin")
    assert (both.code, "several ids begin with twin" in both.err) == (ExitCode.USAGE, True)
    none = shell.inside("timers", "delete", "zzzz")
    assert (none.code, "`nekro timers` lists them" in none.err) == (ExitCode.STORAGE, True)
    assert shell.inside("timers", "list", "twin1").code == ExitCode.USAGE
