"""A primary that dies, freezes or comes back while calls run: Sentinel promotes a replica."""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter
from collections.abc import Callable

import pytest
from chaos_world import Account, call, client_of, key, opened, rows, times, until_quiet
from sentinel_group import SentinelGroup
from worker_fleet import Fleet, call_in

from nekro.app.calls.dispatch import CallScope
from nekro.app.services import Services
from nekro.wire.invocation import new_id
from nekro.wire.values import encode_arguments

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

#: Calls per second.
RATE = float(os.environ.get("NEKRO_TEST_SENTINEL_RATE", "100"))
#: Seconds of load before the primary is cut off from its replicas, and until the load ends.
BEFORE_SECONDS, LAG_SECONDS, AFTER_SECONDS = 3.0, 1.0, 10.0
#: Seconds from a promotion until the replaced primary continues. After 5 s a process has left it with the
#: connections on which it waits for replies, and may have kept the others.
THAW_SECONDS = (4.0, 0.0, 2.0, 7.0)


class Load:
    """Sends calls at a steady rate, every tenth one with an effect, in twenty existing chats."""

    def __init__(
        self,
        services: Services,
        account: Account,
        scopes: list[CallScope],
        *,
        rate: float = RATE,
        deadline_seconds: float = 60,
    ) -> None:
        self._services, self._account, self._scopes = services, account, scopes
        self._rate, self._deadline_seconds = rate, deadline_seconds
        self.sent_at: dict[str, float] = {}
        self.call_ids: dict[str, str] = {}
        self._is_stopping = False

    async def run(self) -> None:
        """Send until ``stop``, then wait for every outcome."""
        tasks, begin = [], time.monotonic()
        while not self._is_stopping:
            due = int((time.monotonic() - begin) * self._rate)
            tasks += [asyncio.create_task(self._one(number)) for number in range(len(tasks), due)]
            await asyncio.sleep(0.005)
        await asyncio.gather(*tasks)

    def stop(self) -> None:
        """Stop sending."""
        self._is_stopping = True

    async def _one(self, number: int) -> None:
        name, method = (f"T{number}", "work") if number % 10 else (f"E{number}", "effect")
        self.sent_at[name] = time.monotonic()
        self.call_ids[name] = new_id()
        outcome = call_in(
            self._services,
            await self._services.find_method(method),
            encode_arguments((name,), {}),
            self._scopes[number % len(self._scopes)],
            seconds=self._deadline_seconds,
            call_id=self.call_ids[name],
        )
        await self._account.follow(name, outcome)


@pytest.mark.parametrize("end", ["killed", "frozen"])
async def test_failover_to_a_lagging_replica_loses_no_call_and_doubles_none(
    make_chaos: Callable[..., Fleet], sentinel_group: SentinelGroup, end: str
) -> None:
    fleet = make_chaos(broker=sentinel_group.settings())
    fleet.start("methods", "methods", concurrency=32)
    account = Account()
    async with opened(fleet) as services:
        await call(services, "work", "T-first")
        chats = [await services.chat(f"c{number}") for number in range(20)]
        load = Load(services, account, [CallScope(chat=chat, user_id=None) for chat in chats])
        running = asyncio.create_task(load.run())
        await asyncio.sleep(BEFORE_SECONDS)
        old = await asyncio.to_thread(sentinel_group.cut_off)
        await asyncio.sleep(LAG_SECONDS)
        ended_at = time.monotonic()
        old.kill() if end == "killed" else sentinel_group.freeze(old)
        await asyncio.to_thread(sentinel_group.wait_for_failover, old)
        promoted_at = time.monotonic()
        await asyncio.sleep(AFTER_SECONDS)
        load.stop()
        await running
        await until_quiet(fleet)
        doubled, missing = await account.doubled_and_missing(services, fleet)
    answered = [
        load.sent_at[name] + account.seconds[name] for name in account.ok if load.sent_at[name] > ended_at
    ]
    recovered = min(answered) - ended_at
    later = [name for name in load.sent_at if load.sent_at[name] > promoted_at + 6]
    print(
        f"{end}: {account.count} calls, ok={len(account.ok)} unknown={len(account.unknown)} "
        f"{dict(account.error_kinds)}; promoted after {promoted_at - ended_at:.1f} s, first answer after "
        f"{recovered:.1f} s; slowest ok {max(account.seconds[n] for n in account.ok):.1f} s; "
        f"doubled={len(doubled)} lost={len(missing)}; errors after the failover: "
        f"{Counter(account.errors[n].partition(':')[0] for n in later if n in account.errors)}\n"
        f"{list(account.errors.items())[:3]}"
    )
    assert account.count == len(load.sent_at)
    assert account.wild == {} and doubled == [] and missing == []
    # On a machine that is too slow for the rate, SQLite refuses calls and others start too late.
    assert set(account.error_kinds) <= {
        "BrokerUnavailableError",
        "CallTimeoutError",
        "StorageUnavailableError",
    }
    assert set(later) & set(account.ok), "calls are answered after the failover"


@pytest.mark.parametrize("run", range(int(os.environ.get("NEKRO_TEST_REPEATS", "1"))))
async def test_calls_are_answered_while_a_replaced_primary_comes_back(
    make_chaos: Callable[..., Fleet], sentinel_group: SentinelGroup, run: int
) -> None:
    """The replaced primary accepts commands for about 10 s, until the Sentinels demote it."""
    fleet = make_chaos(broker=sentinel_group.settings())
    fleet.start("methods", "methods", "methods", concurrency=32)
    account = Account()
    async with opened(fleet) as services:
        await call(services, "work", "T-first")
        chats = [await services.chat(f"c{number}") for number in range(20)]
        scopes = [CallScope(chat=chat, user_id=None) for chat in chats]
        # Slow, so that workers have connections without pending requests when the primary freezes.
        load = Load(services, account, scopes, rate=RATE / 4, deadline_seconds=30)
        running = asyncio.create_task(load.run())
        await asyncio.sleep(BEFORE_SECONDS)
        old = sentinel_group.primary()
        sentinel_group.freeze(old)
        await asyncio.to_thread(sentinel_group.wait_for_failover, old)
        await asyncio.sleep(THAW_SECONDS[run % len(THAW_SECONDS)])
        sentinel_group.thaw(old)
        thawed_at = time.monotonic()
        await asyncio.to_thread(sentinel_group.wait_for_demotion, old)
        demoted_at = time.monotonic()
        await asyncio.sleep(AFTER_SECONDS / 2)
        load.stop()
        await running
        await until_quiet(fleet)
        with client_of(fleet) as client:
            dead = client.llen(key(fleet, "dead"))
        doubled, missing = await account.doubled_and_missing(services, fleet)
        done = {row[0] for row in await rows(services, "SELECT id FROM calls WHERE state = 'done'")}
    told_otherwise = [name for name in account.errors if load.call_ids[name] in done]
    starts = times(fleet, "start")
    late = [name for name in account.ok if account.seconds[name] > 25]
    print(
        f"thawed {run}: {account.count} calls, ok={len(account.ok)} unknown={len(account.unknown)} "
        f"{dict(account.error_kinds)}; demoted {demoted_at - thawed_at:.1f} s after the thaw; slowest ok "
        f"{max(account.seconds[n] for n in account.ok):.1f} s, {len(late)} near the deadline; "
        f"doubled={len(doubled)} lost={len(missing)} dead={dead} told otherwise={len(told_otherwise)} "
        f"TOOL twice={sum(n > 1 for name, n in starts.items() if name[0] == 'T')}\n"
        f"{list(account.errors.items())[:3]}"
    )
    assert account.count == len(load.sent_at)
    assert account.wild == {} and doubled == [] and missing == [] and told_otherwise == []
    assert dead == 0
    assert set(account.error_kinds) <= {"BrokerUnavailableError"}
