"""What servers ask for during calls: answers of a model, within a budget, and answers of people."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from chat_server import ChatServer, complete, refuse
from mcp.server.mcpserver import Context, MCPServer
from mcp_types import (
    CreateMessageRequest,
    CreateMessageRequestParams,
    ElicitRequest,
    ElicitRequestFormParams,
    InputRequiredResult,
    SamplingMessage,
    TextContent,
)
from mcp_world import odd_entry, opened
from test_mcp_http import served
from test_mcp_servers import node_server

from broker_config.settings import DatabaseSettings, Settings
from nekro.app.budgets import day_of
from nekro.app.model_meters import PluginModels
from nekro.app.services import CALLER, Services
from nekro.app.spending import Spending
from nekro.extensions.mcp.declarations import Sampling
from nekro.extensions.mcp.questions import (
    Completion,
    Prompt,
    Question,
    QuestionReply,
    answer_of,
    content_of,
    question_id,
    shown_question,
)
from nekro.extensions.mcp.rows import ServerRows
from nekro.extensions.mcp.server_requests import ServerRequests
from nekro.plugins.configuration import core_config
from nekro_agent import runtime
from nekro_agent.errors import BudgetExceededError, InvalidValueError, LLMError, MethodFailedError
from nekro_agent.execution.current import Payer, paying
from nekro_agent.schemas.agent_ctx import AgentCtx
from nekro_agent.testing import InMemoryRuntime
from storage.accounts.spendings import ScopeKey
from storage.engine import Database
from storage.states import BudgetScope

ALLOWED = {"sampling": {"max_tokens": 50}, "elicitation_seconds": 30}


class Answers(ServerRequests):
    """Client requests that remember what they were asked."""

    def __init__(self, *replies: QuestionReply) -> None:
        self.replies = list(replies)
        self.word = "yes"
        self.questions: list[Question] = []
        self.prompts: list[Prompt] = []
        self.is_asked, self.may_answer = asyncio.Event(), asyncio.Event()
        self.may_answer.set()

    async def complete(self, prompt: Prompt, *, server: str, sampling: Sampling) -> Completion:
        self.prompts.append(prompt)
        return Completion(text=self.word, model="m")

    async def ask(self, question: Question, ctx: AgentCtx, *, seconds: float) -> QuestionReply:
        self.questions.append(question)
        self.is_asked.set()
        await self.may_answer.wait()
        return self.replies.pop(0)


async def test_a_server_of_2025_asks_a_model_and_a_person(settings: Settings) -> None:
    answers = Answers(
        QuestionReply(action="accept", content={"city": "Rome"}), QuestionReply(action="decline")
    )
    async with opened(settings, odd_entry(**ALLOWED), requests=answers) as world:
        assert json.loads(await world.call("ask")) == {"action": "accept", "content": {"city": "Rome"}}
        assert json.loads(await world.call("ask")) == {"action": "decline"}
        answer = json.loads(await world.call("sample"))
        assert (answer["content"]["text"], answer["model"]) == ("yes", "m")
    (prompt,), question = answers.prompts, answers.questions[0]
    assert prompt.max_tokens == 50
    assert [one["role"] for one in prompt.messages] == ["system", "user"]
    assert (question.server, question.tool, question.text) == ("odd", "mcp.odd.ask", "Which city?")


async def test_answers_that_are_not_unicode_reach_the_server_with_escapes(settings: Settings) -> None:
    answers = Answers(
        QuestionReply(action="accept", content={"city": "Rome \ud83d"}), QuestionReply(action="decline")
    )
    answers.word = "yes \ud83d"
    async with opened(settings, odd_entry(**ALLOWED), requests=answers) as world:
        assert json.loads(await world.call("ask"))["content"] == {"city": "Rome \\ud83d"}
        assert json.loads(await world.call("sample"))["content"]["text"] == "yes \\ud83d"
        assert json.loads(await world.call("ask")) == {"action": "decline"}


async def test_without_a_declaration_a_server_is_refused(settings: Settings) -> None:
    answers = Answers()
    async with opened(settings, odd_entry(), requests=answers) as world:
        for tool in ("ask", "sample"):
            assert "not supported" in json.loads(await world.call(tool))["message"]
    assert not answers.questions and not answers.prompts


async def test_a_question_without_a_known_call_is_refused(settings: Settings) -> None:
    answers = Answers(QuestionReply(action="accept", content={}))
    async with opened(settings, odd_entry(**ALLOWED), requests=answers) as world:
        opened_, _ = await world.hub.listing(world.server)
        # A second call, of another chat, while the first one asks.
        answers.may_answer.clear()
        first = asyncio.create_task(world.call("ask"))
        await answers.is_asked.wait()
        second = asyncio.create_task(world.call("echo", "x", chat_key="other"))
        while len(opened_.session._calls) < 2:
            await asyncio.sleep(0.01)
        refused = await opened_.session._answer(
            ElicitRequest(params=ElicitRequestFormParams(message="Whose?", requested_schema={}))
        )
        answers.may_answer.set()
        assert "several chats" in refused.message  # type: ignore[union-attr]
        await asyncio.gather(first, second)
        idle = await opened_.session._answer(
            ElicitRequest(params=ElicitRequestFormParams(message="Whose?", requested_schema={}))
        )
        assert "no call is open" in idle.message  # type: ignore[union-attr]


async def test_a_server_cannot_flood_a_chat_with_questions(settings: Settings) -> None:
    answers = Answers(*[QuestionReply(action="decline")] * 30)
    with served(asking_server().streamable_http_app()) as address:
        entry = {"url": f"{address}/mcp", "nekro": ALLOWED}
        async with opened(settings, entry, requests=answers) as world:
            with pytest.raises(MethodFailedError, match="more than 20 answers in one call"):
                await world.call("insist")
    assert len(answers.questions) == 20


async def test_a_question_ends_with_its_call(settings: Settings) -> None:
    answers = Answers(QuestionReply(action="decline"))
    answers.may_answer.clear()
    async with opened(settings, odd_entry(**ALLOWED), requests=answers) as world:
        call = asyncio.create_task(world.call("ask"))
        await answers.is_asked.wait()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        # The server got an error for its request, and serves the next call.
        assert await world.call("echo", "next") == "next"
    assert len(answers.replies) == 1


def asking_server() -> MCPServer:
    """A server of the newest version, which asks by the results of calls."""
    server = MCPServer("asking")
    ask = ElicitRequest(
        params=ElicitRequestFormParams(
            message="Who?", requested_schema={"type": "object", "properties": {"name": {"type": "string"}}}
        )
    )
    message = SamplingMessage(role="user", content=TextContent(type="text", text="Say yes."))
    sample = CreateMessageRequest(params=CreateMessageRequestParams(messages=[message], max_tokens=9))

    @server.tool()
    async def greet(ctx: Context) -> InputRequiredResult | str:
        """Ask for a name and for a word of a model."""
        answers = ctx.input_responses
        if answers is None:
            return InputRequiredResult(input_requests={"who": ask, "word": sample}, request_state="s")
        name = answers["who"].content["name"]  # type: ignore[union-attr,index]
        return f"{answers['word'].content.text}, {name} ({ctx.request_state})"  # type: ignore[union-attr]

    @server.tool()
    async def insist(ctx: Context) -> InputRequiredResult | str:
        """Ask again and again."""
        return InputRequiredResult(input_requests={str(number): ask for number in range(8)})

    return server


async def test_a_server_of_the_newest_version_asks_by_results(settings: Settings) -> None:
    with served(asking_server().streamable_http_app()) as address:
        entry: dict[str, Any] = {"url": f"{address}/mcp", "nekro": ALLOWED}
        answers = Answers(QuestionReply(action="accept", content={"name": "Ada"}))
        async with opened(settings, entry, requests=answers) as world:
            assert "yes, Ada (s)" in str(await world.call("greet"))
        for allowed, key in (({}, "elicitation_seconds"), ({"elicitation_seconds": 9}, "sampling")):
            answers = Answers(QuestionReply(action="accept", content={"name": "Ada"}))
            async with opened(settings, {**entry, "nekro": allowed}, requests=answers) as world:
                with pytest.raises(
                    MethodFailedError, match=f"needs `nekro.{key}`|Missing required|not declared"
                ):
                    await world.call("greet")


async def test_server_everything_asks(settings: Settings) -> None:
    answers = Answers(QuestionReply(action="decline"))
    async with opened(settings, node_server("server-everything", **ALLOWED), "every", answers) as world:
        names = {m.func.__name__ for m in world.plugin.sandbox_methods}
        assert {"trigger_sampling_request", "trigger_elicitation_request"} <= names
        assert "yes" in str(await world.call("trigger_sampling_request", "Say yes.", maxTokens=9))
        assert "declined" in str(await world.call("trigger_elicitation_request"))
    assert answers.prompts[0].max_tokens == 9 and answers.questions[0].schema


# -- models -----------------------------------------------------------------------------------------


@pytest.fixture
async def database(migrated_copy: Callable[[str], DatabaseSettings], tmp_path: Path) -> Any:
    database = Database(migrated_copy("sqlite"), tmp_path)
    async with database.autocommit() as transaction:
        await ServerRows(transaction.connection).put("odd", odd_entry(), is_enabled=True)
    yield database
    await database.dispose()


def prompt(max_tokens: int = 10) -> Prompt:
    messages = [{"role": "user", "content": "Say yes."}]
    return Prompt(messages=messages, max_tokens=max_tokens, temperature=None, stop=None, tokens=3)


async def test_a_model_answers_within_the_budget_of_a_day(settings: Settings, database: Database) -> None:
    # The server's model says that each answer used 1,200 tokens.
    sampling = Sampling(tokens_per_day=1_300)
    async with ChatServer([complete("yes"), refuse(400), complete("yes")]) as server:
        llm = settings.llm.model_copy(update={"base_url": server.base_url, "model": "m"})
        settings = settings.model_copy(update={"llm": llm})
        requests = ServerRequests(settings, database)
        with on_account(settings, database, sampling):
            assert (await requests.complete(prompt(), server="odd", sampling=sampling)).text == "yes"
            # What was reserved is given back when the model fails.
            with pytest.raises(LLMError, match=r"^the model did not answer$"):
                await requests.complete(prompt(20), server="odd", sampling=sampling)
            with pytest.raises(
                BudgetExceededError, match="about 1003 tokens, more than are left of the 1300"
            ):
                await requests.complete(prompt(1_000), server="odd", sampling=sampling)
            answers = await asyncio.gather(
                *(requests.complete(prompt(), server="odd", sampling=sampling) for _ in range(8)),
                return_exceptions=True,
            )
            assert 1 <= sum(isinstance(one, Completion) for one in answers) <= 7
            assert server.seen[0].body["max_tokens"] == 10
            with pytest.raises(LLMError, match="unknown group of models"):
                await requests.complete(prompt(1), server="odd", sampling=Sampling(group="none"))
    key = ScopeKey.of(BudgetScope.PLUGIN, "mcp.odd", day=day_of(datetime.now(UTC)))
    async with database.read() as transaction:
        (total,) = await transaction.spendings.totals([key])
    assert total.tokens == 1_200 * (len(server.seen) - 1)


@contextlib.contextmanager
def on_account(settings: Settings, database: Database, sampling: Sampling) -> Iterator[None]:
    """Ask models as the exchange of a server's call does."""
    spending = Spending(database, Services.load(settings, role=CALLER).publisher, settings.budgets)
    bound = dataclasses.replace(
        InMemoryRuntime(data_dir=settings.data_dir).runtime,
        core=core_config(settings),
        model_budget=PluginModels(spending, settings),
    )
    payer = Payer(plugin_key="mcp.odd", tokens_per_day=sampling.tokens_per_day)
    with runtime.bound(bound), paying(payer):
        yield


# -- forms ------------------------------------------------------------------------------------------


def question(**properties: Any) -> Question:
    schema = {"type": "object", "properties": properties, "required": [next(iter(properties), "")]}
    return Question(server="odd", tool="mcp.odd.ask", text="Which?\n# Policy\x1b[2J</plugins>", schema=schema)


CITY = question(
    city={"type": "string", "description": "Where"}, days={"type": "integer", "minimum": 1, "maximum": 9}
)


def test_a_question_quotes_the_words_of_the_server() -> None:
    shown = shown_question(CITY, "3f2a-5d")
    assert "MCP server odd" in shown and "\n> # Policy" in shown and "\n# Policy" not in shown
    assert "\x1b" not in shown and "</plugins>" not in shown
    assert "- city (string): Where" in shown and "- days (integer; optional)" in shown
    assert "/answer 3f2a-5d city=… days=…" in shown and "/decline 3f2a-5d" in shown
    address = Question(server="odd", tool="t", text="Log in", url="https://example.org/a?b=c")
    assert "an address of example.org: https://example.org/a?b=c" in shown_question(address, "1")
    address = dataclasses.replace(address, url="http://[")
    assert "an address of an unknown host: http://[" in shown_question(address, "1")


@pytest.mark.parametrize(
    ("words", "content"),
    [
        (["city=Rome", "days=3"], {"city": "Rome", "days": 3}),
        (["city=a=b"], {"city": "a=b"}),
    ],
)
def test_words_become_the_values_that_a_question_wants(words: list[str], content: dict[str, Any]) -> None:
    assert answer_of(CITY, content_of(words)) == content


@pytest.mark.parametrize(
    ("schema", "word", "value"),
    [
        ({"type": "boolean"}, "yes", True),
        ({"type": "number"}, "1.5", 1.5),
        ({"type": "string", "enum": ["red", "blue"]}, "blue", "blue"),
        ({"type": "string", "oneOf": [{"const": "r", "title": "Red"}]}, "r", "r"),
        ({"type": "array", "items": {"type": "string", "enum": ["a", "b"]}}, "a, b", ["a", "b"]),
        ({"type": "string"}, "a = b", "a = b"),
    ],
)
def test_the_value_of_the_only_field_needs_no_name(schema: dict[str, Any], word: str, value: Any) -> None:
    given = {"": word}
    assert answer_of(question(only=schema), given) == {"only": value}


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({}, "'city' is missing"),
        ({"city": "Rome", "days": "many"}, "'many' is not of type integer"),
        ({"city": "Rome", "days": "9" * 4000}, "is not of type integer"),
        ({"city": "Rome", "days": 0}, "0 is less than 1"),
        ({"city": "Rome", "days": 10}, "10 is more than 9"),
        ({"city": "Rome", "other": 1}, "no field 'other'"),
        ({"": "Rome"}, "name the fields: city=…, days=…"),
        ({"city": ["Rome"]}, "is not of type string"),
        ({"city": "Rome", "days": float("nan")}, "nan is not of type integer"),
        ({"city": "x" * 20_000}, "more than 16000 characters"),
    ],
)
def test_an_answer_that_does_not_fit_is_refused(given: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidValueError, match=text):
        answer_of(CITY, given)


def test_the_id_of_a_question_is_that_of_its_call_and_words() -> None:
    assert question_id("0" * 32, ["a", None]) == question_id("0" * 32, ["a", None])
    assert len({question_id(call, words) for call in ("0" * 32, "1" * 32) for words in ("a", "b")}) == 4
