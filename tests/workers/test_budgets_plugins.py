"""What plugins ask of models: counted by plugin, chat, user and turn, and refused over budget."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Any

import pytest
from chat_server import ChatServer, SeenRequest, complete, refuse, respond

from broker_config.settings import DatabaseSettings, Settings
from nekro.app.budgets import day_of
from nekro.app.model_meters import PluginModels
from nekro.app.services import CALLER, Services
from nekro.plugins.commands import CommandTable
from nekro_agent import runtime
from nekro_agent.api.plugin import NekroPlugin
from nekro_agent.commands.schemas import CommandExecutionContext, CommandResponseStatus
from nekro_agent.errors import BudgetExceededError, LLMError
from nekro_agent.execution.current import Payer, current_payer, paying
from nekro_agent.services.agent.openai import gen_openai_chat_response, gen_openai_embeddings
from nekro_agent.testing import InMemoryRuntime
from storage.accounts.spendings import ScopeKey, Total
from storage.states import BudgetScope

VECTOR = {
    "object": "list", "model": "e", "usage": {"prompt_tokens": 30, "total_tokens": 30},
    "data": [{"object": "embedding", "index": 0, "embedding": [0.5, 0.25]}],
}  # fmt: skip
PAYER = Payer(plugin_key="tests.asker", chat_key="chat", user_id="ada", adapter_key="cli", turn_id="t")


@dataclasses.dataclass
class World:
    """A chat server, and the services that count what is asked of it."""

    server: ChatServer
    services: Services

    async def ask(self, **options: Any) -> str:
        """Ask the model of group ``default`` as a plugin does."""
        given = {"model": "m", "base_url": self.server.base_url, "max_tokens": 50, **options}
        answer = await gen_openai_chat_response(messages=[{"role": "user", "content": "Hi"}], **given)
        return answer.response_content

    async def total(self, scope: BudgetScope, name: str) -> Total | None:
        """Return what a scope used today."""
        key = ScopeKey.of(scope, name, day=day_of(datetime.now(UTC)))
        async with self.services.database.read() as tx:
            return next(iter(await tx.spendings.totals([key])), None)


@pytest.fixture(params=["sqlite", "postgres"])
def open_world(
    request: pytest.FixtureRequest,
    make_settings: Callable[..., Settings],
    migrated_copy: Callable[[str], DatabaseSettings],
) -> Callable[..., Any]:
    """Open a world with behaviours of the server and settings of budgets."""

    @asynccontextmanager
    async def open_(*behaviours: Any, **budgets: Any) -> AsyncIterator[World]:
        async with ChatServer(list(behaviours)) as server:
            settings = make_settings(
                database=migrated_copy(request.param).model_dump(),
                budgets=budgets,
                llm={
                    "base_url": server.base_url,
                    "model": "m",
                    "input_price_per_million": 1000.0,
                    "cached_input_price_per_million": 100.0,
                },
                models={"text-embedding": {"model": "e", "embedding": True, "input_price": 2000.0}},
            )
            services = Services.load(settings, role=CALLER)
            bound = dataclasses.replace(
                InMemoryRuntime(data_dir=settings.data_dir).runtime,
                model_budget=PluginModels(services.spending, settings),
            )
            with runtime.bound(bound), paying(PAYER):
                yield World(server, services)
            await services.close()

    return open_


async def test_requests_are_counted_by_plugin_chat_user_and_turn(open_world: Callable[..., Any]) -> None:
    async with open_world(complete("yes"), respond(200, VECTOR)) as world:
        assert await world.ask() == "yes"
        vector = await gen_openai_embeddings(model="e", input="text", base_url=world.server.base_url)
        assert vector == [0.5, 0.25]
        for scope, name in (
            (BudgetScope.PLUGIN, "tests.asker"),
            (BudgetScope.CHAT, "chat"),
            (BudgetScope.USER, "cli:ada"),
            (BudgetScope.TURN, "t"),
            (BudgetScope.DAY, ""),
        ):
            total = await world.total(scope, name)
            assert total is not None, scope
            assert (total.tokens, total.rounds) == (1230, 0)
            assert total.cost == pytest.approx(1000 * 1000 / 1e6 + 30 * 2000 / 1e6)
        async with world.services.database.read() as tx:
            sums = await tx.spending_reports.sums("model", since=None, until=None, after=None, limit=9)
        assert [(one.key, one.requests, one.prompt_tokens) for one in sums] == [("e", 1, 30), ("m", 1, 1000)]


@pytest.mark.parametrize(
    ("reported", "cached"),
    [({"cached_tokens": 600}, 600), ({"cached_tokens": 5000}, 1000), ({"cached_tokens": -9}, 0), ({}, 0)],
)
async def test_cached_tokens_have_their_own_price(
    reported: dict[str, int], cached: int, open_world: Callable[..., Any]
) -> None:
    async with open_world(complete("yes", usage={"prompt_tokens_details": reported})) as world:
        await world.ask()
        total = await world.total(BudgetScope.PLUGIN, "tests.asker")
        assert total is not None and total.tokens == 1200
        assert total.cost == pytest.approx(((1000 - cached) * 1000 + cached * 100) / 1e6)


@pytest.mark.parametrize(
    ("usage", "text", "is_estimated"),
    [
        ({}, "yes", False),
        ({"prompt_tokens": None}, "yes", True),
        ({"completion_tokens": None}, "yes", True),
        ({"prompt_tokens": 0}, "yes", True),
        ({"completion_tokens": 0}, "yes", True),
        ({"completion_tokens": 0}, "", False),
    ],
    ids=["reported", "no-prompt", "no-answer", "prompt-0", "answer-0", "empty-answer"],
)
async def test_tokens_that_the_endpoint_does_not_report_are_marked(
    open_world: Callable[..., Any], usage: dict[str, Any], text: str, is_estimated: bool
) -> None:
    async with open_world(complete(text, usage=usage)) as world:
        await world.ask()
        total = await world.total(BudgetScope.PLUGIN, "tests.asker")
        assert total is not None and total.estimated_requests == int(is_estimated)
        assert (total.tokens == 1000 + 200 * bool(text)) is not is_estimated and total.cost


async def test_an_embedding_without_usage_is_marked(open_world: Callable[..., Any]) -> None:
    async with open_world(respond(200, {**VECTOR, "usage": None}), respond(200, VECTOR)) as world:
        for _ in range(2):
            await gen_openai_embeddings(model="e", input="text", base_url=world.server.base_url)
        total = await world.total(BudgetScope.PLUGIN, "tests.asker")
        assert total is not None and (total.estimated_requests, total.tokens) == (1, 32)


async def test_a_command_is_on_the_account_of_its_plugin_chat_and_user(
    open_world: Callable[..., Any],
) -> None:
    async with open_world(complete("yes"), user="tokens=1500") as world:
        plugin = NekroPlugin("Asker", "asker", "", "1", "tests", "")

        @plugin.mount_command("ask", "Ask.")
        async def ask(_context: CommandExecutionContext) -> str:
            return await world.ask()

        @plugin.mount_command("ask_twice", "Ask twice.")
        async def ask_twice(_context: CommandExecutionContext) -> AsyncIterator[str]:
            yield await world.ask()
            yield await world.ask()

        table = CommandTable([plugin])
        who = CommandExecutionContext(user_id="bob", chat_key="bobs", adapter_key="sse")
        with paying(Payer(plugin_key="another", chat_key="others")):
            assert [one.message async for one in table.run("/ask", who)] == ["yes"]
            async for answer in table.run("/ask_twice", who):
                assert answer.message == "yes"
                account = current_payer()
                assert account is not None and account.plugin_key == "another"
                break
        for scope, name in (
            (BudgetScope.PLUGIN, "tests.asker"),
            (BudgetScope.CHAT, "bobs"),
            (BudgetScope.USER, "sse:bob"),
        ):
            total = await world.total(scope, name)
            assert total is not None and total.tokens == 2400, scope
        assert await world.total(BudgetScope.CHAT, "others") is None
        (refused,) = [one async for one in table.run("/ask", who)]
        assert refused.status is CommandResponseStatus.ERROR
        assert "your budget for today is used up (2,400 of 1,500 tokens)" in refused.message
        assert len(world.server.seen) == 2


async def test_a_used_up_budget_refuses_requests_before_they_are_sent(open_world: Callable[..., Any]) -> None:
    async with open_world(complete("yes"), chat="tokens=1200") as world:
        await world.ask()
        with pytest.raises(BudgetExceededError, match=r"1,200 of 1,200 tokens.*renews at") as refused:
            await world.ask()
        assert isinstance(refused.value, LLMError) and len(world.server.seen) == 1
        with paying(dataclasses.replace(PAYER, chat_key="other")):
            await world.ask()


async def test_a_model_that_does_not_answer_costs_nothing(open_world: Callable[..., Any]) -> None:
    async with open_world(refuse(400)) as world:
        with pytest.raises(LLMError):
            await world.ask()
        total = await world.total(BudgetScope.DAY, "")
        assert total is not None and total.tokens == 0


async def test_an_abandoned_request_counts_as_estimated(open_world: Callable[..., Any]) -> None:
    asked = asyncio.Event()

    async def hang(_: asyncio.StreamWriter, __: SeenRequest) -> None:
        asked.set()
        await asyncio.Event().wait()

    async with open_world(hang) as world:
        work = asyncio.create_task(world.ask())
        await asked.wait()
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)
        total = await world.total(BudgetScope.PLUGIN, "tests.asker")
        assert total is not None and 50 < total.tokens < 60


async def test_a_model_that_is_in_no_group_is_not_counted(open_world: Callable[..., Any]) -> None:
    async with open_world(complete("yes"), day="tokens=1") as world:
        for _ in range(2):
            assert await world.ask(model="another") == "yes"
        assert await world.total(BudgetScope.DAY, "") is None


@pytest.mark.extended
async def test_fifty_requests_at_once_do_not_exceed_a_budget(open_world: Callable[..., Any]) -> None:
    async with open_world(complete("yes"), day="tokens=510") as world:  # each is expected to use 51
        answers = await asyncio.gather(*(world.ask() for _ in range(50)), return_exceptions=True)
        admitted = sum(answer == "yes" for answer in answers)
        assert 1 <= admitted <= 10 and len(world.server.seen) == admitted
        assert all(answer == "yes" or isinstance(answer, BudgetExceededError) for answer in answers)
        total = await world.total(BudgetScope.DAY, "")
        assert total is not None and total.tokens == 1200 * admitted
