"""What a key pays for outside of turns: calls, runs, and what their methods ask of models."""

from __future__ import annotations

import asyncio
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

from gateway.app import create_app
from gateway.identity import Scope
from storage.access.spendings import ScopeKey
from storage.engine import Database
from storage.states import BudgetScope
from workers.budgets.limits import day_of

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
