"""`GET /series`: figures per hour or day, who may read them, and wrong ranges."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from gateway_server import served
from httpx import AsyncClient
from test_gateway_costs import key_of

from nekro.gateway.app import create_app
from nekro.operations.actor import Scope
from nekro_client import AsyncClient as Nekro
from nekro_client.models import Series
from storage.accounts.spendings import ModelUse, NewSpending
from storage.engine import Database
from storage.repositories.rounds import RoundReport, RoundRequest
from storage.states import RoundState, TriggerKind


async def fill(database: Database, *, payers: tuple[str | None, ...] = (None, None)) -> None:
    """Let a turn per payer end now, the last one failed, and spend something for each."""
    async with database.begin() as tx:
        await tx.chats.ensure("chat")
        lease = await tx.chats.acquire("chat", owner="w", lease_seconds=60)
        assert lease is not None
        for number, payer in enumerate(payers):
            asked = RoundRequest(chat_key="chat", trigger_kind=TriggerKind.MESSAGE, trigger_id=f"m{number}")
            round_, _ = await tx.rounds.request(asked)
            claimed = await tx.rounds.claim_next("chat", fence=lease, worker="w")
            assert claimed is not None
            state = RoundState.FAILED if number == len(payers) - 1 else RoundState.DONE
            fence = claimed.round.fence
            await tx.rounds.finish(round_.id, fence=fence, state=state, report=RoundReport())
            use = ModelUse(group="g", model="m", prompt_tokens=10, completion_tokens=5, cost=0.5)
            day = datetime.now(UTC).date().isoformat()
            await tx.spendings.add(NewSpending(id=f"e{number}", day=day, key_id=payer, use=use))
            if payer is not None:
                await tx.keys.add_turn(payer, round_.id)


async def read(client: AsyncClient, headers: dict[str, str] | None = None, **params: Any) -> Series:
    answer = await client.get("/api/v1/series", params=params, headers=headers)
    assert answer.status_code == 200, answer.text
    return Series.model_validate(answer.json())


def summed(found: Series, *names: str) -> tuple[float, ...]:
    """Return the sums of some figures of all points: the end of an hour may lie between them."""
    return tuple(sum(getattr(point, name) for point in found.points) for name in names)


async def test_a_day_is_shown_in_hours_and_more_than_three_days_in_days(fresh_fleet: Any) -> None:
    services = fresh_fleet.services()
    await fill(services.database)
    await services.close()
    async with served(create_app(fresh_fleet.settings)) as client:
        hours = await read(client)
        authorization = client.headers["Authorization"].removeprefix("Bearer ")
        async with Nekro(str(client.base_url), key=authorization) as nekro:
            days = await nekro.series(since=datetime.now(UTC) - timedelta(days=29))
    assert (hours.interval, days.interval) == ("hour", "day")
    assert len(hours.points) in (24, 25) and len(days.points) in (30, 31)
    for found in (hours, days):
        steps = {
            later.begins_at - one.begins_at
            for one, later in zip(found.points, found.points[1:], strict=False)
        }
        assert steps == {timedelta(hours=1) if found is hours else timedelta(days=1)}
        assert found.points[0].begins_at == found.since and found.complete_since is None
        assert summed(found, "turns", "failed", "cancelled") == (2, 1, 0)
        assert summed(found, "prompt_tokens", "completion_tokens", "cost") == (20, 10, 1.0)
        for point in found.points:
            assert (point.turn_p50_ms is not None) == (point.turn_p95_ms is not None) == (point.turns > 0)


async def test_a_key_without_admin_sees_what_it_pays_for(fresh_fleet: Any) -> None:
    services = fresh_fleet.services()
    headers = await key_of(services.database, scopes=(Scope.READ,))
    refused = [
        await key_of(services.database, scopes=(Scope.POST,)),
        await key_of(services.database, scopes=(Scope.ADMIN,), chats="a-*"),
    ]
    async with services.database.read() as tx:
        (own,) = [key for key in await tx.keys.all() if key.scopes == ["read"]]
    await fill(services.database, payers=(own.id, None))
    await services.close()
    async with served(create_app(fresh_fleet.settings)) as client:
        found = await read(client, headers)
        for other in refused:
            assert (await client.get("/api/v1/series", headers=other)).status_code == 403
    assert summed(found, "turns", "failed", "prompt_tokens") == (1, 0, 10)


@pytest.mark.parametrize(
    "wrong",
    [
        {"since": "2026-05-04T00:00:00"},
        {"since": "2026-05-04T00:00:00Z", "until": "2026-05-04T00:00:00Z"},
        {"since": "2026-01-01T00:00:00Z", "until": "2026-05-04T00:00:00Z"},
        {"until": "0001-01-01T00:00:00Z"},
        {"until": "9999-12-31T23:59:59-12:00"},
        {"since": "yesterday"},
    ],
    ids=["naive", "empty", "long", "before-time", "after-time", "words"],
)
async def test_a_wrong_range_is_refused(gateway: Any, wrong: dict[str, str]) -> None:
    _, client = gateway
    answer = await client.get("/api/v1/series", params=wrong)
    assert answer.status_code == 422, answer.text
