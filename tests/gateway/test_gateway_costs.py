"""`GET /costs`: sums in pages, budgets, who may read them; over a socket and by the client."""

from __future__ import annotations

import io
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from gateway_server import served
from httpx import AsyncClient

from broker_config.settings import Settings
from nekro.app.budgets import day_of
from nekro.cli.command import Deps
from nekro.cli.commands.costs import Args, show
from nekro.cli.output import Output
from nekro.gateway.app import create_app
from nekro.operations.actor import Scope
from nekro.operations.keys import new_key, store_key
from nekro_client.models import Costs
from storage.accounts.spendings import ModelUse, NewSpending
from storage.engine import Database


@pytest.fixture
def day() -> str:
    """Today, also in a run that began yesterday."""
    return day_of(datetime.now(UTC))


async def fill(database: Database, day: str) -> None:
    async with database.begin() as transaction:
        for number in range(3):
            use = ModelUse(group="g", model="m", prompt_tokens=100 * number, completion_tokens=10, cost=0.5)
            await transaction.spendings.add(
                NewSpending(
                    id=f"e{number}", day=day, chat_key=f"costs{number}", user_id="ada", turn_id=f"t{number}",
                    rounds=1, use=use,
                )
            )  # fmt: skip


async def key_of(database: Database, **limits: Any) -> dict[str, str]:
    new, key = new_key("test", **limits)
    await store_key(database, new, by=None, request_id=None)
    return {"Authorization": f"Bearer {key}"}


async def read(client: AsyncClient, **params: Any) -> Costs:
    answer = await client.get("/api/v1/costs", params=params)
    assert answer.status_code == 200, answer.text
    return Costs.model_validate(answer.json())


@pytest.mark.extended
async def test_sums_and_budgets(fresh_fleet: Any, day: str) -> None:
    services = fresh_fleet.services()
    await fill(services.database, day)
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
            (day, 3, 300, 30)
        ]
        assert [(one.scope, one.id, one.measure, one.period, one.state) for one in whole.budgets] == [
            ("chat", "costs2", "tokens", day, "exhausted"),
            ("turn", "t2", "tokens", "turn", "exhausted"),
            ("user", "ada", "cost", day, "warned"),
            ("chat", "costs1", "tokens", day, "ok"),
            ("day", "", "rounds", day, "ok"),
            ("chat", "costs0", "tokens", day, "ok"),
        ]
        midnight = datetime.fromisoformat(day).replace(tzinfo=UTC) + timedelta(days=1)
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


async def test_estimated_requests_are_shown_by_the_api_the_client_and_the_command(
    fresh_fleet: Any, day: str
) -> None:
    services = fresh_fleet.services()
    await fill(services.database, day)
    use = ModelUse(group="g", model="m", requests=4, estimated_requests=3, prompt_tokens=9)
    async with services.database.begin() as transaction:
        await transaction.spendings.settle("e0", [use], sandbox_seconds=None)
    await services.close()
    limits = {"chat": {"tokens": 200.0, "rounds": 9.0}}
    budgets = fresh_fleet.settings.budgets.model_copy(update=limits)
    settings = fresh_fleet.settings.model_copy(update={"budgets": budgets})
    async with served(create_app(settings)) as client:
        found = await read(client, by="chat")
    sums = [(one.key, one.requests, one.estimated_requests) for one in found.items]
    assert sums == [("costs0", 4, 3), ("costs1", 0, 0), ("costs2", 0, 0)]
    uses = {(one.id, one.measure): one.estimated_requests for one in found.budgets}
    assert uses["costs0", "tokens"] == 3 and sum(uses.values()) == 3
    args = Args(by="chat", since=None, until=None, json=False)
    shown = io.StringIO()
    deps = Deps(output=Output(stdout=shown), data_dir=None, load_settings=Settings.load)
    show([one.model_dump() for one in found.items], [one.model_dump() for one in found.budgets], args, deps)
    lines = [line.split() for line in shown.getvalue().splitlines()]
    assert ["costs0", "1", "4", "3"] in [line[:4] for line in lines]
    assert ["costs1", "1", "0", "-"] in [line[:4] for line in lines]
    marked = [line[1] for line in lines if "(estimated)" in line]
    assert marked == ["costs0"]


def test_costs_of_a_gateway_without_the_mark_are_read(day: str) -> None:
    one = {"key": "k", "rounds": 1, "requests": 1, "prompt_tokens": 1, "completion_tokens": 1, "cost": 1,
           "sandbox_seconds": 0}  # fmt: skip
    budget = {"scope": "day", "id": "", "measure": "tokens", "period": day, "limit": 9, "used": 1,
              "renews_at": None, "state": "ok"}  # fmt: skip
    read = Costs.model_validate({"items": [one], "budgets": [budget], "next_cursor": None})
    assert (read.items[0].estimated_requests, read.budgets[0].estimated_requests) == (0, 0)


async def test_all_costs_need_an_unrestricted_key_with_the_scope_admin(fresh_fleet: Any) -> None:
    services = fresh_fleet.services()
    allowed = await key_of(services.database, scopes=(Scope.ADMIN,))
    others = [
        await key_of(services.database, scopes=(Scope.POST,)),
        await key_of(services.database, scopes=(Scope.ADMIN,), chats="a-*"),
        await key_of(services.database, scopes=(Scope.ADMIN,), user_id="ada"),
    ]
    await services.close()
    async with served(create_app(fresh_fleet.settings)) as client:
        assert (await client.get("/api/v1/costs", headers=allowed)).status_code == 200
        for headers in others:
            assert (await client.get("/api/v1/costs", headers=headers)).status_code == 403
        assert (await client.get("/api/v1/costs", headers={"Authorization": ""})).status_code == 401


async def test_a_key_without_admin_sees_what_it_pays_for(fresh_fleet: Any, day: str) -> None:
    services = fresh_fleet.services()
    headers = await key_of(services.database, scopes=(Scope.READ,), chats="a-*", tokens_per_day=100)
    await key_of(services.database, scopes=(Scope.POST,), tokens_per_day=200)
    async with services.database.begin() as transaction:
        first, second = sorted(await transaction.keys.all(), key=lambda key: key.tokens_per_day or 0)
        for number, key_id in enumerate((first.id, second.id, None)):
            use = ModelUse(prompt_tokens=10 + number)
            spent = NewSpending(id=f"e{number}", day=day, chat_key=f"c{number}", key_id=key_id, use=use)
            await transaction.spendings.add(spent)
    await services.close()
    async with served(create_app(fresh_fleet.settings)) as client:
        answer = await client.get("/api/v1/costs", params={"by": "chat"}, headers=headers)
        found = Costs.model_validate(answer.json())
    assert [(one.key, one.prompt_tokens) for one in found.items] == [("c0", 10)]
    assert [(one.scope, one.id, one.used) for one in found.budgets] == [("key", first.id, 10)]


async def test_the_budgets_of_a_key_are_those_it_has_itself(fresh_fleet: Any, day: str) -> None:
    services = fresh_fleet.services()
    await key_of(services.database, scopes=(Scope.POST,), tokens_per_day=100)
    async with services.database.begin() as transaction:
        (key,) = await transaction.keys.all()
        use = ModelUse(prompt_tokens=90)
        await transaction.spendings.add(NewSpending(id="e", day=day, key_id=key.id, use=use))
    admin = await key_of(services.database, scopes=(Scope.ADMIN,))
    await services.close()
    async with served(create_app(fresh_fleet.settings)) as client:
        answer = await client.get("/api/v1/costs", params={"by": "key"}, headers=admin)
        found = Costs.model_validate(answer.json())
    assert [(one.scope, one.id, one.used, one.limit, one.state) for one in found.budgets] == [
        ("key", key.id, 90, 100, "warned")
    ]
    assert [one.key for one in found.items] == [key.id]
