"""`GET /costs`: sums in pages, budgets, who may read them; over a socket and by the client."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from gateway_server import served
from httpx import AsyncClient

from gateway.access.keys import create_key, new_key
from gateway.app import create_app
from gateway.identity import Scope
from nekro_client.models import Costs
from storage.access.spendings import ModelUse, NewSpending
from storage.engine import Database
from workers.budgets.limits import day_of

DAY = day_of(datetime.now(UTC))


async def fill(database: Database) -> None:
    async with database.begin() as transaction:
        for number in range(3):
            use = ModelUse(group="g", model="m", prompt_tokens=100 * number, completion_tokens=10, cost=0.5)
            await transaction.spendings.add(
                NewSpending(
                    id=f"e{number}", day=DAY, chat_key=f"costs{number}", user_id="ada", turn_id=f"t{number}",
                    rounds=1, use=use,
                )
            )  # fmt: skip


async def key_of(database: Database, **limits: Any) -> dict[str, str]:
    new, key = new_key("test", **limits)
    await create_key(database, new, by=None, request_id=None)
    return {"Authorization": f"Bearer {key}"}


async def read(client: AsyncClient, **params: Any) -> Costs:
    answer = await client.get("/api/v1/costs", params=params)
    assert answer.status_code == 200, answer.text
    return Costs.model_validate(answer.json())


@pytest.mark.extended
async def test_sums_and_budgets(fresh_fleet: Any) -> None:
    services = fresh_fleet.services()
    await fill(services.database)
    limits = {
        "chat": {"tokens": 200.0},
        "user": {"cost": 1.6},
        "turn": {"tokens": 200.0},
        "day": {"rounds": 9.0},
    }
    budgets = fresh_fleet.settings.budgets.model_copy(update=limits)
    settings = fresh_fleet.settings.model_copy(update={"budgets": budgets})
    async with served(create_app(settings)) as client:
        whole = await read(client)
        assert [(one.key, one.rounds, one.prompt_tokens, one.completion_tokens) for one in whole.items] == [
            (DAY, 3, 300, 30)
        ]
        assert [(one.scope, one.id, one.measure, one.period, one.state) for one in whole.budgets] == [
            ("chat", "costs2", "tokens", DAY, "exhausted"),
            ("turn", "t2", "tokens", "turn", "exhausted"),
            ("user", "ada", "cost", DAY, "warned"),
            ("chat", "costs1", "tokens", DAY, "ok"),
            ("day", "", "rounds", DAY, "ok"),
            ("chat", "costs0", "tokens", DAY, "ok"),
        ]
        midnight = datetime.fromisoformat(DAY).replace(tzinfo=UTC) + timedelta(days=1)
        assert [one.renews_at for one in whole.budgets[:3]] == [midnight, None, midnight]
        first = await read(client, by="chat", limit=2)
        second = await read(client, by="chat", limit=2, cursor=first.next_cursor)
        assert [one.key for one in (*first.items, *second.items)] == ["costs0", "costs1", "costs2"]
        assert first.budgets and not second.budgets and second.next_cursor is None
        past = await read(client, until=(datetime.now(UTC).date() - timedelta(days=1)).isoformat())
        assert past.items == []
        for params in ({"by": "colour"}, {"since": "yesterday"}, {"limit": 0}, {"cursor": "é"}):
            refused = await client.get("/api/v1/costs", params=params)
            assert refused.status_code == 422, params
    await services.close()


async def test_costs_need_an_unrestricted_key_with_the_scope_admin(fresh_fleet: Any) -> None:
    services = fresh_fleet.services()
    allowed = await key_of(services.database, scopes=(Scope.ADMIN,))
    others = [
        await key_of(services.database, scopes=(Scope.READ, Scope.POST)),
        await key_of(services.database, scopes=(Scope.ADMIN,), chats="a-*"),
        await key_of(services.database, scopes=(Scope.ADMIN,), user_id="ada"),
    ]
    await services.close()
    async with served(create_app(fresh_fleet.settings)) as client:
        assert (await client.get("/api/v1/costs", headers=allowed)).status_code == 200
        for headers in others:
            assert (await client.get("/api/v1/costs", headers=headers)).status_code == 403
        assert (await client.get("/api/v1/costs")).status_code == 401


async def test_the_budgets_of_a_key_are_those_it_has_itself(fresh_fleet: Any) -> None:
    services = fresh_fleet.services()
    await key_of(services.database, scopes=(Scope.POST,), tokens_per_day=100)
    async with services.database.begin() as transaction:
        (key,) = await transaction.keys.all()
        use = ModelUse(prompt_tokens=90)
        await transaction.spendings.add(NewSpending(id="e", day=DAY, key_id=key.id, use=use))
    admin = await key_of(services.database, scopes=(Scope.ADMIN,))
    await services.close()
    async with served(create_app(fresh_fleet.settings)) as client:
        answer = await client.get("/api/v1/costs", params={"by": "key"}, headers=admin)
        found = Costs.model_validate(answer.json())
    assert [(one.scope, one.id, one.used, one.limit, one.state) for one in found.budgets] == [
        ("key", key.id, 90, 100, "warned")
    ]
    assert [one.key for one in found.items] == [key.id]
