"""The ledger of what is spent: entries, totals, settling and sums."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from storage.accounts.keys import NewKey
from storage.accounts.spendings import ModelUse, NewSpending, ScopeKey, Total, user_scope
from storage.driver.statements import prepared
from storage.engine import Database
from storage.repositories.rounds import Round, RoundRequest
from storage.states import BudgetScope, TriggerKind, account_of_key

DAY = "2026-05-04"


def new(number: int, **given: object) -> NewSpending:
    values: dict[str, object] = {
        "id": f"e{number}", "day": DAY, "chat_key": "chat", "user_id": "ada", "turn_id": "t", "rounds": 1,
        "sandbox_seconds": 60.0,
        "use": ModelUse(group="g", model="m", prompt_tokens=10, completion_tokens=5, cost=0.5),
    }  # fmt: skip
    return NewSpending(**(values | given))  # type: ignore[arg-type]


async def totals(database: Database) -> dict[str, Total]:
    keys = [
        ScopeKey.of(scope, name, day=DAY)
        for scope, name in (
            (BudgetScope.TURN, "t"), (BudgetScope.CHAT, "chat"), (BudgetScope.USER, "ada"),
            (BudgetScope.KEY, "k"), (BudgetScope.PLUGIN, "p"), (BudgetScope.DAY, ""),
        )
    ]  # fmt: skip
    async with database.read() as tx:
        return {total.scope: total for total in await tx.spendings.totals(keys)}


async def test_an_estimate_counts_at_once_and_is_replaced_by_what_was_used(database: Database) -> None:
    async with database.begin() as tx:
        added = {total.scope: total for total in await tx.spendings.add(new(1, key_id="k"))}
    assert set(added) == {"turn", "chat", "user", "key", "day"}
    for total in added.values():
        assert (total.tokens, total.cost, total.rounds, total.sandbox_seconds) == (15, 0.5, 1, 60)
    uses = [
        ModelUse(group="g", model="m", requests=2, prompt_tokens=12, completion_tokens=0, cost=0.25),
        ModelUse(group="h", model="n", requests=1, prompt_tokens=12, completion_tokens=3, cost=1.0),
    ]
    for seconds in (None, 1.5, 1.5):  # settling twice counts once
        async with database.begin() as tx:
            await tx.spendings.settle("e1", uses, sandbox_seconds=seconds)
    for total in (await totals(database)).values():
        assert (total.tokens, total.cost, total.rounds, total.sandbox_seconds) == (27, 1.25, 1, 1.5)
    async with database.read() as tx:
        sums = await tx.spending_reports.sums("model", since=DAY, until=DAY, after=None, limit=9)
    assert [(one.key, one.requests, one.prompt_tokens, one.rounds) for one in sums] == [
        ("m", 2, 12, 1), ("n", 1, 12, 0),
    ]  # fmt: skip


async def test_an_entry_without_an_estimate_is_counted_once_by_model(database: Database) -> None:
    uses = [
        ModelUse(group="g", model="m", requests=2, prompt_tokens=12, cost=0.25, estimated_requests=1),
        ModelUse(group="h", model="n", requests=1, prompt_tokens=12, completion_tokens=3, cost=1.0),
    ]
    for _ in range(2):
        async with database.begin() as tx:
            entered = await tx.spendings.enter(new(1, key_id="k"), uses, sandbox_seconds=1.5)
    found = await totals(database)
    assert {total.scope: total for total in entered} == found
    assert set(found) == {"turn", "chat", "user", "key", "day"}
    for total in found.values():
        assert (total.tokens, total.cost, total.rounds, total.sandbox_seconds) == (27, 1.25, 1, 1.5)
        assert total.estimated_requests == 1
    async with database.begin() as tx:
        await tx.spendings.enter(new(2, use=ModelUse()), [], sandbox_seconds=0.5)
    assert (await totals(database))["day"].sandbox_seconds == 2
    async with database.read() as tx:
        sums = await tx.spending_reports.sums("model", since=DAY, until=DAY, after=None, limit=9)
    assert [(one.key, one.requests, one.rounds) for one in sums] == [("", 0, 1), ("m", 2, 1), ("n", 1, 0)]


@pytest.mark.parametrize("before", ["nothing", "an estimate", "what was used"])
async def test_what_an_interrupted_attempt_used_is_counted_once(database: Database, before: str) -> None:
    entry, used = new(1, key_id="k"), ModelUse(group="g", model="m", requests=1, prompt_tokens=4, cost=0.25)
    async with database.begin() as tx:
        if before != "nothing":
            await tx.spendings.add(entry)
        if before == "what was used":  # as a worker of an earlier release does, which may have asked twice
            twice = ModelUse(group="g", model="m", requests=2, prompt_tokens=7, cost=0.5)
            await tx.spendings.settle(entry.id, [twice], sandbox_seconds=None)
    for _ in range(2):
        async with database.begin() as tx:
            await tx.spendings.settle_interrupted(entry, used)
    total = (await totals(database))["key"]
    tokens, cost = (7, 0.5) if before == "what was used" else (4, 0.25)
    assert (total.tokens, total.cost, total.rounds, total.sandbox_seconds) == (tokens, cost, 1, 60)


@pytest.mark.parametrize("by", ["day", "chat", "user", "key", "plugin", "model"])
async def test_estimated_requests_are_counted_in_each_total_and_grouping(database: Database, by: str) -> None:
    async def counted(key: str) -> dict[str, int]:
        async with database.read() as tx:
            sums = await tx.spending_reports.sums(by, since=None, until=None, after=None, limit=9)
        assert [one.key for one in sums] == [key]
        return {one.scope: one.estimated_requests for one in (await totals(database)).values()} | {
            "sum": sums[0].estimated_requests
        }

    expected = ModelUse(group="g", model="m", estimated_requests=1, prompt_tokens=9)
    key = {"day": DAY, "chat": "chat", "user": "ada", "key": "k", "plugin": "p", "model": "m"}[by]
    scopes = ("turn", "chat", "user", "key", "plugin", "day", "sum")
    async with database.begin() as tx:
        await tx.spendings.add(new(1, key_id="k", plugin_key="p", is_of_plugin=True, use=expected))
    assert await counted(key) == dict.fromkeys(scopes, 1)
    for estimated in (2, 2, 0):  # settling twice counts once
        uses = [
            ModelUse(group="g", model="m", requests=3, estimated_requests=estimated, prompt_tokens=9),
            ModelUse(group="h", model="m", requests=1, estimated_requests=estimated // 2),
        ]
        async with database.begin() as tx:
            await tx.spendings.settle("e1", uses, sandbox_seconds=1.5, is_of_plugin=True)
        assert await counted(key) == dict.fromkeys(scopes, estimated + estimated // 2)


async def test_entries_of_a_release_without_the_mark_count_as_reported(database: Database) -> None:
    async with database.begin() as tx:
        await tx.connection.exec_driver_sql(
            "INSERT INTO spendings (id, part, day, model_group, model, rounds, requests, prompt_tokens, "
            "completion_tokens, cost, sandbox_seconds, created_at) "
            f"VALUES ('old', 0, '{DAY}', 'g', 'm', 1, 1, 9, 1, 0.5, 0.0, CURRENT_TIMESTAMP)"
        )
        await tx.connection.exec_driver_sql(
            "INSERT INTO spending_totals (scope, period, id, tokens, cost, rounds, sandbox_seconds, warned, "
            f"updated_at) VALUES ('day', '{DAY}', '', 10, 0.5, 1, 0.0, '', CURRENT_TIMESTAMP)"
        )
    async with database.read() as tx:
        (one,) = await tx.spending_reports.sums("day", since=None, until=None, after=None, limit=9)
    assert (one.requests, one.estimated_requests) == (1, 0)
    assert (await totals(database))["day"].estimated_requests == 0


async def test_an_entry_of_the_same_id_is_counted_once(database: Database) -> None:
    for _ in range(2):
        async with database.begin() as tx:
            await tx.spendings.add(new(1))
    assert (await totals(database))["day"].tokens == 15


async def test_concurrent_entries_that_share_totals_are_all_counted(database: Database) -> None:
    async def work(number: int) -> None:
        chat = {"chat_key": f"chat{number % 3}", "user_id": f"u{number % 2}", "turn_id": f"t{number}"}
        async with database.begin() as tx:
            await tx.spendings.add(new(number, **chat))
        async with database.begin() as tx:
            use = ModelUse(group="g", model="m", requests=1, prompt_tokens=number, cost=1.0)
            await tx.spendings.settle(f"e{number}", [use], sandbox_seconds=0.0)

    await asyncio.gather(*(work(number) for number in range(50)))
    total = (await totals(database))["day"]
    assert (total.tokens, total.rounds, total.sandbox_seconds) == (sum(range(50)), 50, 0)
    assert total.cost == pytest.approx(50)


async def test_a_plugin_has_a_total_of_what_it_asked_itself(database: Database) -> None:
    async with database.begin() as tx:
        await tx.spendings.add(new(1, plugin_key="p"))
        await tx.spendings.add(new(2, plugin_key="p", is_of_plugin=True, rounds=0))
        await tx.spendings.settle("e2", [], sandbox_seconds=None, is_of_plugin=True)
    found = await totals(database)
    assert (found["plugin"].tokens, found["plugin"].sandbox_seconds) == (0, 60)
    assert found["day"].tokens == 15
    async with database.read() as tx:
        sums = await tx.spending_reports.sums("plugin", since=None, until=None, after=None, limit=9)
    assert [(one.key, one.rounds) for one in sums] == [("p", 1)]


@pytest.mark.parametrize("by", ["day", "chat", "user", "key", "plugin", "model"])
async def test_sums_come_in_pages(database: Database, by: str) -> None:
    async with database.begin() as tx:
        for number in range(5):
            use = ModelUse(group="g", model=f"m{number}", prompt_tokens=number)
            await tx.spendings.add(
                NewSpending(
                    id=f"e{number}", day=f"2026-05-0{number + 1}", chat_key=f"c{number}",
                    user_id=f"u{number}",
                    key_id=f"k{number}", plugin_key=f"p{number}", use=use,
                )
            )  # fmt: skip
    pages, after = [], None
    while True:
        async with database.read() as tx:
            page = await tx.spending_reports.sums(
                by, since="2026-05-02", until="2026-05-04", after=after, limit=2
            )
        if not page:
            break
        pages.append([one.prompt_tokens for one in page])
        after = page[-1].key
    assert pages == [[1, 2], [3]]


async def test_a_warning_is_recorded_once(database: Database) -> None:
    async with database.begin() as tx:
        await tx.spendings.add(new(1))
    total = (await totals(database))["chat"]
    async with database.begin() as tx:
        assert await tx.spendings.warn(total, "tokens")
        assert not await tx.spendings.warn(total, "tokens")


def test_the_same_id_on_two_adapters_is_two_people() -> None:
    assert user_scope("a", "1") != user_scope("b", "1")
    assert user_scope("a", None) is None and user_scope(None, "") is None
    long = [user_scope("a", "x" * 300 + end) for end in ("1", "2")]
    assert long[0] != long[1] and all(len(name or "") < 200 for name in long)


@pytest.fixture
async def keys(database: Database) -> None:
    """A chat, and keys of which one pays for turn ``paid`` and the other for job ``job``."""
    async with database.begin() as tx:
        await tx.chats.ensure("chat")
        for name, account_id in (("k", "paid"), ("other", "job")):
            await tx.keys.add(NewKey(id=name, name=name, digest=name.encode(), scopes=[], tokens_per_day=7))
            await tx.keys.add_turn(name, account_id)


async def requested(database: Database, **given: object) -> Round:
    values: dict[str, object] = {
        "chat_key": "chat",
        "trigger_kind": TriggerKind.JOB,
        "trigger_id": str(given),
    }
    async with database.begin() as tx:
        return (await tx.rounds.request(RoundRequest(**(values | given))))[0]  # type: ignore[arg-type]


async def payer(database: Database, *rounds: Round) -> str | None:
    async with database.read() as tx:
        key = await tx.spendings.key_of_rounds(rounds)
    assert key is None or key.tokens_per_day == 7
    return key and key.id


@pytest.mark.usefixtures("keys")
@pytest.mark.parametrize(
    ("cause", "expected"),
    [
        ({}, ""),
        ({"cause_turn_id": "free"}, ""),
        ({"cause_turn_id": "paid"}, "k"),
        ({"cause_turn_id": "paid", "account_id": "job"}, "k"),
        ({"cause_turn_id": "free", "account_id": "job"}, "other"),
        ({"account_id": account_of_key("k")}, "k"),
        ({"cause_turn_id": account_of_key("k"), "account_id": "job"}, "k"),
        ({"cause_turn_id": "paid", "account_id": account_of_key("other")}, "k"),
    ],
)
async def test_the_key_that_pays_for_the_cause_is_in_the_rounds_of_a_turn(
    database: Database, cause: dict[str, str], expected: str
) -> None:
    first = await requested(database, **cause)
    assert first.key_id == expected
    # What causes a later round does not change who pays for its turn.
    later = await requested(database, turn_id=first.id, number=2, account_id="job")
    assert later.key_id == expected
    assert await payer(database, first, later) == (expected or None)


@pytest.mark.usefixtures("keys")
async def test_rounds_that_release_0_2_0_requested_are_paid_as_before(database: Database) -> None:
    for number, key_id in enumerate(("k", None)):
        first = await requested(database, trigger_id=f"first-{number}")
        async with database.begin() as tx:
            await tx.connection.exec_driver_sql(f"UPDATE rounds SET key_id = NULL WHERE id = '{first.id}'")
            if key_id is not None:
                await tx.keys.add_turn(key_id, first.id)
            of_then = await tx.rounds.get(first.id)
        assert of_then.key_id is None
        assert await payer(database, of_then) == key_id
        # A worker of this release requests the next round.
        later = await requested(database, turn_id=first.id, number=2)
        assert later.key_id == (key_id or "")
        assert await payer(database, later) == key_id


@pytest.mark.usefixtures("keys")
async def test_the_first_of_merged_rounds_that_a_key_pays_for_determines_the_key(database: Database) -> None:
    free = await requested(database)
    paid = await requested(database, cause_turn_id="paid")
    others = await requested(database, account_id="job")
    assert await payer(database, free) is None
    assert await payer(database, free, paid, others) == "k"
    assert await payer(database, others, paid) == "other"
    async with database.begin() as tx:
        await tx.keys.add_turn("k", paid.turn_id)
    assert await payer(database, replace(others, key_id=None), paid) == "k"


@pytest.mark.usefixtures("keys")
async def test_a_key_is_read_only_for_rounds_that_one_pays_for(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    free, paid = await requested(database), await requested(database, cause_turn_id="paid")
    ran: list[object] = []

    def noting(*given: Any) -> Any:
        ran.append(given[0])
        return prepared(*given)

    monkeypatch.setattr("storage.driver.statements.prepared", noting)
    assert await payer(database, free) is None
    assert len(ran) == 0
    assert await payer(database, free, paid) == "k"
    assert len(ran) == 1
