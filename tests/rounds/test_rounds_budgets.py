"""Budgets of rounds: hard stops, warnings, many rounds at once, workers that die."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from typing import Any

import pytest
from round_bench import Bench, Model, invocation, states
from waiting import WAIT_SECONDS

from nekro.agent.llm import LLMAnswer, LLMRequest, ModelSpent
from nekro.app import use_cases
from nekro.app.budgets import day_of, read_budgets
from nekro.cli.views.round_text import describe_round, round_lines
from nekro.cli.views.turn_text import turn_lines
from nekro.operations.actor import LOCAL, Actor
from nekro.operations.turn_lists import list_turns
from nekro.operations.turns import read_rounds, read_turn
from nekro_agent.errors import BudgetExceededError, LLMError, StorageUnavailableError
from nekro_agent.execution.current import on_account
from nekro_agent.ports import MessageKind
from nekro_client.event_types import EventType
from storage.accounts.keys import NewKey
from storage.accounts.spendings import ScopeKey, Total
from storage.accounts.stored_bytes import ROW_BYTES
from storage.states import BudgetScope, account_of_key

OpenBench = Callable[..., Awaitable[Bench]]
#: Prices that make the answers of ``Model`` (100 + 7 tokens) and their estimates cost something.
PRICES = {"input_price_per_million": 1000.0, "output_price_per_million": 1000.0}
ROUNDS = 50


async def total(bench: Bench, scope: BudgetScope = BudgetScope.DAY, name: str = "") -> Total | None:
    key = ScopeKey.of(scope, name, day=day_of(datetime.now(UTC)))
    async with bench.database.read() as tx:
        return next(iter(await tx.spendings.totals([key])), None)


async def texts(bench: Bench, chat_key: str) -> list[str]:
    said = await bench.messages(chat_key)
    return [message.text for message in said if message.kind is MessageKind.ASSISTANT]


async def endings(bench: Bench, chat_key: str) -> list[dict[str, Any]]:
    async with bench.database.read() as tx:
        events = await tx.events.after(chat_key, number=0, limit=200)
    return [event.data for event in events if event.type == EventType.TURN_ENDED]


@pytest.mark.parametrize("scope", ["chat", "user", "day"])
@pytest.mark.parametrize("measure", ["tokens=107", "cost=0.25", "rounds=1"])
async def test_a_used_up_budget_ends_turns_without_asking_the_model(
    open_bench: OpenBench, kind: str, scope: str, measure: str
) -> None:
    bench = await open_bench(kind, budgets={scope: measure, "warn_at": 1})
    model = Model("")
    await bench.say("chat", "one", user_id="ada")
    await bench.play("chat", bench.drain(model))
    await bench.say("chat", "two", user_id="ada")
    rounds = await bench.play("chat", bench.drain(model))
    assert states(rounds) == ["done", "done"] and len(model.prompts) == 1
    (told,) = await texts(bench, "chat")
    used = {"tokens=107": "107 of 107 tokens", "cost=0.25": "0.25 of 0.25 cost", "rounds=1": "1 of 1 rounds"}
    owner = {
        "chat": "the budget of this chat",
        "user": "your budget",
        "day": "the budget of the whole system",
    }
    assert used[measure] in told and owner[scope] in told
    assert "it renews at " in told and "00:00 UTC" in told
    assert [end.get("error", {}).get("code") for end in await endings(bench, "chat")] == [
        None,
        "budget_exceeded",
    ]


@pytest.mark.extended
async def test_a_turn_has_a_budget_which_a_new_message_renews(open_bench: OpenBench, kind: str) -> None:
    bench = await open_bench(kind, budgets={"turn": "rounds=2"})
    model = Model("exit(9)", "print(2)\nexit(9)", "print(3)\nexit(9)", "")
    await bench.say("chat", "one")
    rounds = await bench.play("chat", bench.drain(model))
    assert states(rounds) == ["done"] * 3 and len(model.prompts) == 2
    assert (await texts(bench, "chat"))[-1] == (
        "I stopped here: the budget of this request is used up (2 of 2 rounds); "
        "a new message begins a new one."
    )
    model.answers = [""]
    await bench.say("chat", "two")
    await bench.play("chat", bench.drain(model))
    assert len(model.prompts) == 3


async def test_sandbox_seconds_are_counted_as_they_were_used(open_bench: OpenBench, kind: str) -> None:
    bench = await open_bench(kind, budgets={"chat": "sandbox_seconds=0.2", "warn_at": 1})
    model = Model("import time\ntime.sleep(0.25)", "")
    await bench.say("chat", "one")
    await bench.play("chat", bench.drain(model))
    used = await total(bench, BudgetScope.CHAT, "chat")
    assert used is not None and 0.2 < used.sandbox_seconds < bench.settings.sandbox.wall_seconds
    await bench.say("chat", "two")
    await bench.play("chat", bench.drain(model))
    assert len(model.prompts) == 1 and "seconds of running code" in (await texts(bench, "chat"))[-1]


async def test_a_chat_is_warned_once(open_bench: OpenBench, kind: str) -> None:
    bench = await open_bench(kind, budgets={"chat": "rounds=4,tokens=1000000", "warn_at": 0.5})
    model = Model("")
    for number in range(4):
        await bench.say("chat", str(number))
        await bench.play("chat", bench.drain(model))
    (told,) = await texts(bench, "chat")
    assert told.startswith(
        "Note: 50% of the budget of this chat for today is used (2 of 4 rounds); it renews at"
    )


async def test_the_key_that_started_a_turn_pays_with_its_own_limits(open_bench: OpenBench, kind: str) -> None:
    bench = await open_bench(kind, budgets={"key": "tokens=1,rounds=3"})
    async with bench.database.begin() as tx:
        await tx.keys.add(NewKey(id="k", name="k", digest=b"1", scopes=[], tokens_per_day=200))
    model = Model("")
    for number in range(3):
        with on_account(account_of_key("k")):
            await bench.say("chat", str(number))
        await bench.play("chat", bench.drain(model))
    assert len(model.prompts) == 2
    async with bench.database.read() as tx:
        # The rows of rounds are on the quota of the key, too.
        assert (await tx.keys.get("k")).stored_bytes >= 2 * ROW_BYTES
    assert (
        "the budget of the API key for today is used up (214 of 200 tokens)"
        in (await texts(bench, "chat"))[-1]
    )


@pytest.mark.extended
@pytest.mark.parametrize(
    ("kind", "measure"),
    [("sqlite", "rounds=12"), ("sqlite", "tokens=60000"), ("sqlite", "cost=60"), ("postgres", "cost=60")],
)
async def test_fifty_rounds_at_once_do_not_exceed_a_budget(
    open_bench: OpenBench, kind: str, measure: str
) -> None:
    bench = await open_bench(kind, llm=PRICES, budgets={"day": measure, "warn_at": 1})
    name, _, limit = measure.partition("=")
    asked, all_decided, spent = 0, asyncio.Event(), 0

    async def wait(_: LLMRequest) -> str:
        nonlocal asked
        asked += 1
        await all_decided.wait()
        return ""

    model = Model(wait)
    drain = bench.drain(model, slots=ROUNDS)
    chats = [f"chat{number}" for number in range(ROUNDS)]
    for chat_key in chats:
        await bench.say(chat_key, "hello", user_id=chat_key)
    tasks = [asyncio.create_task(drain.drain(chat_key)) for chat_key in chats]
    async with asyncio.timeout(WAIT_SECONDS):
        while asked + spent < ROUNDS:
            await asyncio.sleep(0.01)
            spent = sum(task.done() for task in tasks)
    # Every round was admitted or refused, and nothing has been settled: estimates hold the budget.
    held = await total(bench)
    assert held is not None and held.rounds == asked
    one = {"rounds": 1, "tokens": held.tokens / asked, "cost": held.cost / asked}[name]
    assert float(limit) <= getattr(held, name) < float(limit) + one * 1.05
    all_decided.set()
    await asyncio.gather(*tasks)
    used = await total(bench)
    assert used is not None and (used.rounds, used.tokens) == (asked, 107 * asked)
    assert used.cost == pytest.approx(0.25 * asked)
    refused = [chat_key for chat_key in chats if await texts(bench, chat_key)]
    assert len(refused) == ROUNDS - asked


async def test_what_a_dead_worker_asked_for_stays_counted_and_its_successor_counts_again(
    open_bench: OpenBench, kind: str
) -> None:
    bench = await open_bench(kind, budgets={"chat": "rounds=2", "warn_at": 1})
    asked = asyncio.Event()

    async def hang(_: LLMRequest) -> str:
        asked.set()
        await asyncio.Event().wait()
        raise AssertionError

    await bench.say("chat", "hello")
    work = asyncio.create_task(bench.drain(Model(hang)).drain("chat"))
    await asked.wait()
    work.cancel()  # its leases are released, as after their expiry; nothing is written
    await asyncio.gather(work, return_exceptions=True)
    estimate = await total(bench)
    assert estimate is not None and (estimate.rounds, estimate.tokens > 4096) == (1, True)
    rounds = await bench.play("chat", bench.drain(Model(""), owner="w2"))
    assert rounds[0].attempt == 2
    after = await total(bench)
    assert after is not None and (after.rounds, after.tokens) == (2, estimate.tokens + 107)
    async with bench.database.read() as tx:
        sums = await tx.spending_reports.sums("chat", since=None, until=None, after=None, limit=9)
    assert [(one.rounds, one.requests) for one in sums] == [(2, 1)]
    await bench.say("chat", "again")
    await bench.play("chat", bench.drain(Model("")))
    assert "2 of 2 rounds" in (await texts(bench, "chat"))[-1]


LIMIT = {"chat": "rounds=99"}


@pytest.mark.parametrize("budgets", [{}, LIMIT], ids=["no limit", "limit"])
async def test_a_worker_that_dies_in_the_code_keeps_what_the_model_used(
    open_bench: OpenBench, kind: str, budgets: dict[str, str]
) -> None:
    bench = await open_bench(kind, budgets=budgets)
    await bench.say("chat", "hello")
    work = asyncio.create_task(bench.drain(Model('hold("it")')).drain("chat"))
    await bench.noted("begin it")
    work.cancel()
    await asyncio.gather(work, return_exceptions=True)
    await bench.play("chat", bench.drain(Model(""), owner="w2"))
    after = await total(bench)
    assert after is not None and (after.rounds, after.tokens) == (2, 2 * 107)
    # How long the code of the dead worker ran is not known, so its longest time is counted.
    assert after.sandbox_seconds >= bench.settings.sandbox.wall_seconds
    async with bench.database.read() as tx:
        by_model = await tx.spending_reports.sums("model", since=None, until=None, after=None, limit=9)
    assert [(one.key, one.requests, one.rounds) for one in by_model] == [("tests-1", 2, 2)]
    assert by_model[0].cost == pytest.approx(0.5)


async def test_a_worker_that_stops_before_the_answer_counts_what_it_asked_for(
    open_bench: OpenBench, kind: str
) -> None:
    bench = await open_bench(kind)
    asked = asyncio.Event()

    async def hang(request: LLMRequest) -> str:
        assert request.on_spent is not None
        asked.set()
        try:
            await asyncio.Event().wait()
        finally:
            request.on_spent(ModelSpent(group="g", model="m", prompt_tokens=9, answer_tokens=1, cost=0))
        raise AssertionError

    await bench.say("chat", "hello")
    work = asyncio.create_task(bench.drain(Model(hang)).drain("chat"))
    await asked.wait()
    work.cancel()
    await asyncio.gather(work, return_exceptions=True)
    stopped = await total(bench)
    assert stopped is not None and (stopped.tokens, stopped.rounds) == (10, 1)
    await bench.play("chat", bench.drain(Model(""), owner="w2"))
    after = await total(bench)
    assert after is not None and (after.tokens, after.rounds) == (117, 2)


async def test_a_model_is_not_asked_if_the_estimate_cannot_be_recorded(
    open_bench: OpenBench, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = await open_bench(kind, budgets=LIMIT)

    async def fail(*_: Any, **__: Any) -> None:
        raise StorageUnavailableError("the database does not answer")

    await bench.say("chat", "hello")
    model = Model("")
    with monkeypatch.context() as patched:
        patched.setattr(bench.services.spending, "reserve", fail)
        await bench.drain(model).drain("chat")
    assert states(await bench.rounds("chat")) == ["running"] and not model.prompts
    rounds = await bench.play("chat", bench.drain(model, owner="w2"))
    assert [(item.state.value, item.attempt) for item in rounds] == [("done", 2)]
    used = await total(bench)
    assert used is not None and (used.rounds, used.tokens) == (1, 107)


class Failing(Model):
    """Reports two failed requests and no answer."""

    async def complete(self, request: LLMRequest) -> LLMAnswer:
        """Fail."""
        assert request.on_spent is not None
        for model in ("m", "n"):
            spent = ModelSpent(group="g", model=model, prompt_tokens=50, answer_tokens=0, cost=0.5)
            request.on_spent(replace(spent, is_estimated=model == "n"))
        raise LLMError("no answer")


async def test_failed_requests_are_counted_by_model(open_bench: OpenBench, kind: str) -> None:
    bench = await open_bench(kind)
    await bench.say("chat", "hello")
    await bench.play("chat", bench.drain(Failing()))
    used = await total(bench)
    assert used is not None and (used.tokens, used.cost, used.sandbox_seconds) == (100, 1.0, 0)
    async with bench.database.read() as tx:
        sums = await tx.spending_reports.sums("model", since=None, until=None, after=None, limit=9)
    assert [(one.key, one.requests, one.estimated_requests, one.rounds, one.cost) for one in sums] == [
        ("m", 1, 0, 1, 0.5),
        ("n", 1, 1, 0, 0.5),
    ]
    assert used.estimated_requests == 1


class Unreported(Model):
    """Answers in words, with tokens that are an estimate."""

    async def complete(self, request: LLMRequest) -> LLMAnswer:
        """Answer."""
        return replace(await super().complete(request), text="Good morning.", is_estimated=True)


async def test_an_answer_without_reported_tokens_is_marked_wherever_tokens_are_shown(
    open_bench: OpenBench, kind: str
) -> None:
    bench = await open_bench(kind, budgets={"chat": "tokens=1000,rounds=9"})
    for chat_key, model in (("chat", Unreported("")), ("other", Model(""))):
        await bench.say(chat_key, "hello")
        await bench.play(chat_key, bench.drain(model))
    async with bench.database.read() as tx:
        sums = await tx.spending_reports.sums("chat", since=None, until=None, after=None, limit=9)
        budgets = await read_budgets(tx, bench.settings.budgets, day=day_of(datetime.now(UTC)))
    local = Actor(services=bench.services, identity=LOCAL)
    turns = await list_turns(local, limit=9)
    assert {one.key: one.estimated_requests for one in sums} == {"chat": 1, "other": 0}
    marked = {(one.id, one.measure): one.estimated_requests for one in budgets if one.id}
    assert marked == {
        ("chat", "tokens"): 1, ("chat", "rounds"): 0, ("other", "tokens"): 0, ("other", "rounds"): 0,
    }  # fmt: skip
    listed = {turn.chat_key: turn for turn in turns.items}
    assert {key: turn.tokens_estimated for key, turn in listed.items()} == {"chat": True, "other": False}
    for key, turn in listed.items():
        tree = await read_turn(bench.services, turn.id)
        ((_, entry),) = await read_rounds(bench.database, key, limit=9, before=None)
        is_marked = "107 tokens (estimated)" in str(list(turn_lines(tree)))
        text = "\n".join(round_lines(describe_round(entry)))
        assert [is_marked, entry.tokens_estimated, "100 + 7 tokens (estimated)" in text] == [
            key == "chat"
        ] * 3


@pytest.mark.parametrize("budgets", [{}, LIMIT], ids=["no limit", "limit"])
async def test_a_round_that_runs_is_an_estimate_if_something_limits_it(
    open_bench: OpenBench, kind: str, budgets: dict[str, str]
) -> None:
    bench = await open_bench(kind, budgets=budgets)
    seen: list[Total | None] = []

    async def look(_: LLMRequest) -> str:
        seen.append(await total(bench))
        return ""

    await bench.say("chat", "hello")
    await bench.play("chat", bench.drain(Model(look)))
    seen.append(await total(bench))
    assert [one and one.estimated_requests for one in seen] == [1 if budgets else None, 0]


async def test_a_cancelled_round_counts_what_was_sent(open_bench: OpenBench, kind: str) -> None:
    bench = await open_bench(kind)
    asked = asyncio.Event()

    async def hang(request: LLMRequest) -> str:
        assert request.on_spent is not None
        asked.set()
        try:
            await asyncio.Event().wait()
        finally:
            request.on_spent(ModelSpent(group="g", model="m", prompt_tokens=9, answer_tokens=1, cost=0))
        raise AssertionError

    await bench.say("chat", "hello")
    work = asyncio.create_task(bench.drain(Model(hang)).drain("chat"))
    await asked.wait()
    await bench.services.endings.cancel("chat", reason="enough")
    await work
    used = await total(bench)
    assert used is not None and (used.tokens, used.rounds) == (10, 1)


async def test_a_round_that_a_result_woke_is_attributed_to_the_plugin(
    open_bench: OpenBench, kind: str
) -> None:
    bench = await open_bench(kind)
    await bench.say("chat", "hello")
    await bench.play("chat", bench.drain(Model('look("tea")', "")))
    async with bench.database.read() as tx:
        sums = await tx.spending_reports.sums("plugin", since=None, until=None, after=None, limit=9)
    assert [(one.key, one.rounds) for one in sums] == [("", 1), ("tests.scene", 1)]


async def test_code_outside_of_rounds_is_counted_and_refused_too(open_bench: OpenBench, kind: str) -> None:
    bench = await open_bench(kind, budgets={"user": "sandbox_seconds=0.2", "warn_at": 1})
    code = "import time\ntime.sleep(0.25)"
    run = partial(
        use_cases.run_code,
        bench.services,
        code,
        chat_key="chat",
        user_id="ada",
        follow_up=False,
        file_name="x.py",
    )
    await run()
    used = await total(bench)
    assert used is not None and 0.2 < used.sandbox_seconds < WAIT_SECONDS
    assert (used.rounds, used.tokens) == (0, 0)
    with pytest.raises(BudgetExceededError, match="your budget for today is used up"):
        await run()
    after = await total(bench)
    assert after == used


async def test_a_turn_that_follows_from_a_call_is_on_the_key_of_the_turn_of_the_call(
    open_bench: OpenBench, kind: str
) -> None:
    bench = await open_bench(kind, budgets={"key": "rounds=1", "warn_at": 1})
    async with bench.database.begin() as tx:
        await tx.keys.add(NewKey(id="k", name="k", digest=b"1", scopes=[]))
    with on_account(account_of_key("k")):
        await bench.say("chat", "hello")
    (first,) = await bench.rounds("chat")
    model = Model("")
    await bench.play("chat", bench.drain(model))
    # As a call that a person approves after its turn has ended.
    late = invocation("tests.scene.look", ("tea",), call_id="late", round_=first)
    await bench.caller.call(late, lane="methods")
    rounds = await bench.play("chat", bench.drain(model))
    assert rounds[-1].turn_id != first.turn_id and len(model.prompts) == 1
    assert "the budget of the API key" in (await texts(bench, "chat"))[-1]


async def test_a_message_that_code_of_a_round_pushes_is_on_the_key_of_the_round(
    open_bench: OpenBench, kind: str
) -> None:
    """In its own chat it continues the turn; in another one it begins a turn, on the same key."""
    bench = await open_bench(kind, budgets={"key": "rounds=2", "warn_at": 1})
    async with bench.database.begin() as tx:
        await tx.keys.add(NewKey(id="k", name="k", digest=b"1", scopes=[]))
    with on_account(account_of_key("k")):
        await bench.say("chat", "hello")
    (first,) = await bench.rounds("chat")
    model = Model("keep('milk')\nnag()\nnag('elsewhere')", "")
    await bench.play("chat", bench.drain(model))
    (pushed,) = await bench.rounds("elsewhere")
    assert pushed.turn_id != first.turn_id
    await bench.play("elsewhere", bench.drain(model))
    used = await total(bench, BudgetScope.KEY, "k")
    assert used is not None and used.rounds == len(model.prompts) == 2
    assert "the budget of the API key" in (await texts(bench, "elsewhere"))[-1]
    async with bench.database.read() as tx:
        for turn_id in (first.turn_id, pushed.turn_id):
            key = await tx.spendings.paying_key([turn_id])
            assert key is not None and key.id == "k"
        kinds = await tx.connection.exec_driver_sql("SELECT kind FROM key_storage ORDER BY kind")
        # The chat, the recorded call, what it wrote into the history, and the rounds are on its quota, too.
        assert [row[0] for row in kinds] == ["calls", "chats", "messages", "rounds"]
