"""What a key pays for outside of turns: calls, runs, and what their methods ask of models."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import pytest
from chat_server import ChatServer, complete
from gateway_server import served
from test_gateway_keys import key_of
from test_mcp_server import connected
from waiting import eventually
from worker_fleet import Fleet

from nekro.app.budgets import day_of
from nekro.app.chats.writer import TimerFirings
from nekro.gateway.app import create_app
from nekro.operations.actor import Scope
from storage.accounts.spendings import ScopeKey
from storage.engine import Database
from storage.states import BudgetScope
from workers.ops.sweeps import TimerSweep

PLUGINS = Path(__file__).parent / "paid_plugins"


@pytest.fixture(scope="module")
def database_url(sqlite_url: str) -> str:
    """One kind of database: none of this depends on it."""
    return sqlite_url


async def spent(fleet: Fleet, headers: dict[str, str]) -> int:
    """Return the tokens that a key used today."""
    key_id = headers["Authorization"].split("_")[1]
    database = Database(fleet.settings.database, fleet.settings.data_dir)
    async with database.read() as tx:
        named = ScopeKey.of(BudgetScope.KEY, key_id, day=day_of(datetime.now(UTC)))
        total = next(iter(await tx.spendings.totals([named])), None)
    await database.dispose()
    return 0 if total is None else total.tokens


@pytest.mark.extended
async def test_a_key_pays_for_what_the_methods_that_it_calls_ask_of_models(
    make_fleet: Callable[..., Fleet],
) -> None:
    async with ChatServer([complete("yes")] * 9) as server:
        llm = {"base_url": server.base_url, "model": "m"}
        fleet = await asyncio.to_thread(make_fleet, llm=llm, plugins={"dirs": (PLUGINS,)})
        # The import of the library for models blocks a loop, so the method moves to lane `long`.
        await asyncio.to_thread(fleet.start, "methods", "long")
        await asyncio.to_thread(fleet.start, "rounds", concurrency=1)
        scopes = (Scope.CALL, Scope.RUN, Scope.READ, Scope.POST)
        headers = await key_of(fleet, *scopes, chats="c", tokens_per_day=1_000_000)
        call = {"method": "tests.asker.ask", "chat_key": "c", "args": [server.base_url]}
        run = {"code": f"print(ask({server.base_url!r}))", "chat_key": "c"}
        async with served(create_app(fleet.settings)) as client:
            client.timeout = httpx.Timeout(60)

            async def post(path: str, body: dict[str, Any]) -> dict[str, Any]:
                answer = await client.post(path, json=body, headers=headers)
                assert answer.status_code == 200, answer.text
                return dict(answer.json())

            sums = [0]
            assert (await post("/api/v1/calls", call))["value"] == "yes"
            sums.append(await spent(fleet, headers))
            assert (await post("/api/v1/runs", run))["output"] == "yes\n"
            sums.append(await spent(fleet, headers))
            async with connected(client, headers["Authorization"].removeprefix("Bearer ")) as host:
                assert not (await host.call_tool("ask", {"base_url": server.base_url})).is_error
            sums.append(await spent(fleet, headers))
            assert sums == sorted(set(sums)), sums
            woken = await post("/api/v1/runs", {"code": "report()", "chat_key": "c", "follow_up": True})
            assert len(woken["follow_ups"]) == 1

            async def is_paid() -> bool:
                return await spent(fleet, headers) > sums[-1]

            await eventually(is_paid, what="the round that the run has woken")
            poor = await key_of(fleet, *scopes, chats="c", tokens_per_day=1)
            assert (await client.post("/api/v1/calls", json=call, headers=poor)).status_code == 200
            for path, body in (("/api/v1/calls", call), ("/api/v1/runs", run)):
                refused = await client.post(path, json=body, headers=poor)
                assert (refused.status_code, refused.json()["code"]) == (429, "budget_exceeded")


@pytest.fixture(scope="module")
def woken(make_fleet: Callable[..., Fleet]) -> Fleet:
    """A fleet whose plugin wakes agents; no worker runs the rounds that are requested."""
    access = {"plugin_http": ("tests.triggers=key",), "requests_per_minute": 0}
    fleet = make_fleet(plugins={"dirs": (PLUGINS,)}, gateway=access, agent={"debounce_seconds": 0})
    fleet.start("methods", "long")
    return fleet


async def payers(fleet: Fleet, chat_key: str) -> list[str | None]:
    """Return who pays for the turns of a chat."""
    database = Database(fleet.settings.database, fleet.settings.data_dir)
    try:
        async with database.read() as tx:
            rows = await tx.connection.exec_driver_sql(
                "SELECT DISTINCT rounds.turn_id, key_turns.key_id, rounds.key_id FROM rounds"
                " LEFT JOIN key_turns ON key_turns.turn_id = rounds.turn_id"
                f" WHERE rounds.chat_key = '{chat_key}'"
            )
            found = list(rows)
            assert all(row[2] == (row[1] or "") for row in found), "who pays for a round is in its row"
            return [row[1] for row in found]
    finally:
        await database.dispose()


async def fire_timers(fleet: Fleet, *, year: int) -> None:
    """Let the timers of every chat be due since a year, and fire them."""
    services = fleet.services()
    await services.start()
    try:
        async with services.database.begin() as tx:
            for table, column in (("timers", "fire_at"), ("cron_jobs", "next_fire_at")):
                await tx.connection.exec_driver_sql(
                    f"UPDATE {table} SET {column} = '{year}-01-01 00:00:00.000000'"
                )
        await TimerSweep(services.database, TimerFirings(services.publisher)).sweep()
    finally:
        await services.close()


def id_of(headers: dict[str, str]) -> str:
    return headers["Authorization"].split("_")[1]


NOW = (
    "system message", "system message elsewhere", "schedule", "person's message", "timer now",
    "recurring timer now", "job", "job that fails", "end of a job",
)  # fmt: skip
LATER = ("timer", "temporary timer", "recurring timer", "job that sets a timer")


@pytest.mark.extended
async def test_the_key_of_a_call_pays_for_the_turns_that_it_causes_in_any_way(woken: Fleet) -> None:
    headers = await key_of(woken, Scope.CALL)
    async with served(create_app(woken.settings)) as client:

        async def wake(way: str) -> str:
            chat_key = f"call-{way.replace(' ', '-').replace(chr(39), '')}"
            own = chat_key if way == "system message" else f"other-{chat_key}"
            body = {"method": "wake_by", "chat_key": own, "args": [way, chat_key]}
            answer = await client.post("/api/v1/calls", json=body, headers=headers)
            assert answer.status_code == 200, answer.text
            return chat_key

        for way in NOW:
            chat_key = await wake(way)
            await eventually(lambda chat_key=chat_key: payers(woken, chat_key), what=f"a round by {way}")
            assert await payers(woken, chat_key) == [id_of(headers)], way
        chats = {way: await wake(way) for way in LATER}
        database = Database(woken.settings.database, woken.settings.data_dir)

        async def are_set() -> bool:
            async with database.read() as tx:
                rows = await tx.connection.exec_driver_sql(
                    "SELECT count(*) FROM timers WHERE state = 'waiting'"
                )
                return next(iter(rows))[0] == 3

        await eventually(are_set, what="three one-time timers")
        await database.dispose()
        for number in (1, 2):  # the recurring one fires again
            await fire_timers(woken, year=2020 + number)
            for way, chat_key in chats.items():
                repeated = number if way == "recurring timer" else 1
                assert await payers(woken, chat_key) == [id_of(headers)] * repeated, way


@pytest.mark.extended
async def test_the_key_of_a_request_pays_for_what_hooks_commands_webhooks_and_routes_cause(
    woken: Fleet,
) -> None:
    headers = await key_of(woken, Scope.CALL, Scope.POST)
    async with served(create_app(woken.settings)) as client:
        requests = {
            "hook": ("/api/v1/chats/room/messages", {"text": "wake by-hook", "user_id": "ada"}),
            "command": (
                "/api/v1/commands",
                {"line": "/wake by-command", "chat_key": "room", "user_id": "ada"},
            ),
            "webhook": ("/api/webhook/wake_agent", {"chat_key": "by-webhook"}),
            "route": ("/plugins/tests.triggers/wake/by-route", {}),
        }
        for way, (path, body) in requests.items():
            answer = await client.post(path, json=body, headers=headers)
            assert answer.is_success, (way, answer.text)
            assert await payers(woken, f"by-{way}") == [id_of(headers)], way
        # Without a key that is counted nobody pays, although others paid in this process before.
        for way, (path, body) in requests.items():
            path, body = (
                path.replace(f"by-{way}", f"free-{way}"),
                json.loads(json.dumps(body).replace(f"by-{way}", f"free-{way}")),
            )
            answer = await client.post(path, json=body)
            assert answer.is_success, (way, answer.text)
            assert await payers(woken, f"free-{way}") == [None], way


@pytest.mark.extended
async def test_the_key_that_asked_for_a_call_pays_for_what_it_causes_once_approved(woken: Fleet) -> None:
    headers = await key_of(woken, Scope.CALL)
    async with served(create_app(woken.settings)) as client:
        body = {"method": "wake_if_approved", "chat_key": "room", "args": ["approved"]}
        asked = await client.post("/api/v1/calls", json=body, headers=headers)
        assert asked.status_code == 202, asked.text
        approver = await key_of(woken, Scope.APPROVE)
        decided = await client.post(
            f"/api/v1/approvals/{asked.json()['approval_id']}/decision",
            json={"decision": "approve"},
            headers=approver,
        )
        assert decided.is_success, decided.text
        await eventually(lambda: payers(woken, "approved"), what="a round")
        assert await payers(woken, "approved") == [id_of(headers)]
