"""PostgreSQL that restarts immediately or fails over to a standby while calls run, also behind pgbouncer."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator

import pytest
from chaos_world import Account, call, opened, rows, times, until_quiet
from pgbouncer_process import PgBouncer, needs_pgbouncer
from postgres_group import PostgresGroup
from waiting import eventually
from worker_fleet import Fleet, call_in

from nekro.app.calls.dispatch import CallScope
from nekro.app.services import Services
from nekro.wire.values import encode_arguments

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

MakeChaos = Callable[..., Fleet]
#: Calls per second, nine of ten with an effect.
RATE = float(os.environ.get("NEKRO_TEST_POSTGRES_RATE", "50"))
#: Calls that end before and after the fault.
BEFORE, AFTER = 150, 300
#: Connections of the pooler to PostgreSQL.
SERVERS = 8
#: Seconds in which the primary commits without replicating to its standby.
LAG_SECONDS = 1.0


@pytest.fixture
def group(request: pytest.FixtureRequest) -> Iterator[PostgresGroup]:
    """A primary; ``synchronous`` says whether its commits wait for the standby."""
    with PostgresGroup(is_synchronous=getattr(request, "param", "") == "synchronous") as group:
        yield group


class Load:
    """Calls at a steady rate in existing chats until ``stop``."""

    def __init__(self, services: Services, account: Account) -> None:
        self._services, self._account = services, account
        self._is_stopping = False
        self.sent: list[str] = []

    async def run(self) -> None:
        """Send until ``stop``, then wait for every outcome."""
        chats = [await self._services.chat(f"c{number}") for number in range(20)]
        scopes = [CallScope(chat=chat, user_id=None) for chat in chats]
        tasks, begin = [], time.monotonic()
        while not self._is_stopping:
            due = int((time.monotonic() - begin) * RATE)
            tasks += [
                asyncio.create_task(self._one(number, scopes[number % len(scopes)]))
                for number in range(len(tasks), due)
            ]
            await asyncio.sleep(0.005)
        await asyncio.gather(*tasks)

    def stop(self) -> None:
        """Stop sending."""
        self._is_stopping = True

    async def _one(self, number: int, scope: CallScope) -> None:
        name, method = (f"E{number}", "effect") if number % 10 else (f"T{number}", "work")
        self.sent.append(name)
        outcome = call_in(
            self._services,
            await self._services.find_method(method),
            encode_arguments((name, 0.05), {}),
            scope,
            seconds=60,
        )
        await self._account.follow(name, outcome)


async def under_load(fleet: Fleet, fault: Callable[[], None]) -> tuple[Account, list[str], list[str], float]:
    """Inject the fault while calls run; returns the account, duplicates, losses, and the outage."""
    account = Account()
    fleet.start("methods", "methods", concurrency=16)
    async with opened(fleet) as services:
        await call(services, "work", "T-first")
        load = Load(services, account)
        running = asyncio.create_task(load.run())
        await eventually(lambda: len(account.ok) >= BEFORE, what="calls before the fault")
        begin = time.monotonic()
        await asyncio.to_thread(fault)
        outage = time.monotonic() - begin
        known = len(account.ok)
        await eventually(lambda: len(account.ok) >= known + AFTER, what="calls after the fault")
        load.stop()
        await running
        await until_quiet(fleet, seconds=60)
        running_rows = "SELECT count(*) FROM calls WHERE state IN ('queued', 'running')"
        left = (await rows(services, running_rows))[0][0]
        doubled, missing = await account.doubled_and_missing(services, fleet)
    assert account.count == len(load.sent), "each call has one outcome"
    assert account.wild == {}
    assert left == 0, "calls that never end"
    print(
        f"{account.count} calls, ok={len(account.ok)} unknown={len(account.unknown)} "
        f"errors={dict(account.error_kinds)} slowest={max(account.seconds.values()):.1f} s "
        f"outage={outage:.1f} s doubled={len(doubled)} lost={len(missing)} "
        f"ran={Counter(times(fleet, 'start').values())}"
    )
    return account, doubled, missing, outage


def only_refusals_did_not_run(account: Account, fleet: Fleet) -> None:
    """Callers saw database errors only, and calls reported as not run did not run."""
    assert set(account.error_kinds) <= {"StorageUnavailableError"}, account.errors
    ran = times(fleet, "start")
    assert [name for name in account.errors if name[0] == "E" and ran[name]] == []


@pytest.mark.parametrize("way", ["direct", pytest.param("pooled", marks=needs_pgbouncer)])
async def test_46_immediate_restart_under_load_loses_no_call_and_doubles_none(
    make_chaos: MakeChaos, group: PostgresGroup, way: str
) -> None:
    """``pg_ctl restart -m immediate``: no checkpoint, recovery from the log."""

    def restart() -> None:
        group.primary.end(signal.SIGQUIT)
        group.primary.start()

    with contextlib.ExitStack() as stack:
        url = group.url
        if way == "pooled":
            pooler = stack.enter_context(PgBouncer(url, default_pool_size=SERVERS))
            url = pooler.url(pool_mode="transaction")
        fleet = make_chaos(database_url=url)
        account, doubled, missing, _ = await under_load(fleet, restart)
        assert (doubled, missing) == ([], [])
        only_refusals_did_not_run(account, fleet)
        fleet.stop()


@pytest.mark.parametrize("group", ["synchronous", "asynchronous"], indirect=True)
async def test_47_failover_to_a_standby_under_load(
    make_chaos: MakeChaos, group: PostgresGroup, request: pytest.FixtureRequest
) -> None:
    """The standby is cut off first; a standby that commits wait for has every confirmed transaction."""
    await asyncio.to_thread(group.add_standby)
    fleet = make_chaos(database_url=group.url)

    def fail_over() -> None:
        group.cut_off()
        time.sleep(LAG_SECONDS)
        group.primary.end(signal.SIGKILL)
        group.promote()

    account, doubled, missing, _ = await under_load(fleet, fail_over)
    if request.node.callspec.params["group"] == "synchronous":
        assert (doubled, missing) == ([], [])
        only_refusals_did_not_run(account, fleet)
