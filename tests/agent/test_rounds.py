"""Rounds with a scripted model and a real sandbox."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml
from waiting import WAIT_SECONDS

from broker_config.settings import AgentSettings, AnswerMode, SandboxSettings
from nekro.agent.llm import LLMAnswer, LLMRequest
from nekro.agent.llm.scripted_client import ScriptedClient
from nekro.agent.model import ChatBrief, HistoryMessage, MethodBrief, Observation, PluginBrief, TurnRound
from nekro.agent.rounds import RoundInput, RoundOutcome, RoundRunner
from nekro.sandbox.manager import SandboxManager
from nekro.sandbox.models import (
    KeptVariables,
    Raised,
    Returned,
    Stopped,
    StopType,
    StubCall,
    StubMethod,
    StubResult,
)
from nekro.wire.values import decode_arguments, encode_value
from nekro_agent.errors import FencedError, LLMError, SandboxUnavailableError
from nekro_agent.methods import SandboxMethodType
from nekro_agent.ports import MessageKind
from storage.files.areas import DataAreas
from storage.repositories.round_values import RoundReport

CHAT = ChatBrief(chat_key="c:1", container_key="box1")
SANDBOX = SandboxSettings()

METHODS = (
    StubMethod(
        token="m1", name="add", path="a.calc.add", signature="(a: int, b: int) -> int", doc="Add.",
        type=SandboxMethodType.TOOL, timeout_seconds=30,
    ),
    StubMethod(
        token="m2", name="search", path="a.web.search", signature="(query: str) -> str", doc="Search.",
        type=SandboxMethodType.AGENT, timeout_seconds=30,
    ),
)  # fmt: skip
PLUGIN = PluginBrief(
    key="a.calc",
    name="Calc",
    module_name="calc",
    methods=[
        MethodBrief(name=m.name or m.path, signature=m.signature, doc=m.doc, type=m.type) for m in METHODS
    ],
)


class Calls:
    """A dispatch that answers like plugins and records the calls."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, Any]] = []

    async def __call__(self, call: StubCall) -> StubResult:
        args, kwargs = decode_arguments(call.arguments, max_bytes=1 << 20)
        self.seen.append((call.token, (args, kwargs)))
        if call.token == "m2":
            return Stopped(stop=StopType.AGENT)
        if not all(isinstance(value, int) for value in args):
            return Raised(error_type="ValueError", message="no numbers")
        return Returned(value=encode_value(sum(args), max_bytes=1 << 20))


@pytest.fixture
async def sandbox(tmp_path: Path) -> AsyncIterator[SandboxManager]:
    manager = SandboxManager(SANDBOX, DataAreas(tmp_path / "data"))
    try:
        await manager.start()
    except SandboxUnavailableError as exc:
        pytest.skip(f"no sandbox on this machine: {exc}")
    yield manager
    await manager.close()


@pytest.fixture
def scripted(tmp_path: Path) -> Callable[..., ScriptedClient]:
    def build(*answers: str | dict[str, Any]) -> ScriptedClient:
        entries = [{"answer": answer} if isinstance(answer, str) else answer for answer in answers]
        path = tmp_path / "script.yaml"
        path.write_text(yaml.safe_dump(entries), "utf-8")
        return ScriptedClient(path, record=tmp_path / "requests.jsonl")

    return build


@pytest.fixture
def play(sandbox: SandboxManager, scripted: Callable[..., ScriptedClient]) -> Callable[..., Any]:
    """Run one round with the given answers; settings and input fields by keyword."""

    async def play_(*answers: Any, agent: AgentSettings | None = None, **fields: Any) -> RoundOutcome:
        return await runner(scripted(*answers), sandbox, agent).run(round_input(**fields))

    return play_


def runner(llm: Any, sandbox: Any, agent: AgentSettings | None = None) -> RoundRunner:
    return RoundRunner(
        llm=llm, sandbox=sandbox, agent_settings=agent or AgentSettings(), sandbox_settings=SANDBOX
    )


def round_input(**fields: Any) -> RoundInput:
    now = datetime.now(UTC)
    values: dict[str, Any] = {
        "round_id": "r1", "chat": CHAT, "number": 1, "turn_started_at": now, "plugins": [PLUGIN],
        "methods": METHODS, "dispatch": Calls(),
        "history": [
            HistoryMessage(message_id="m1", kind=MessageKind.USER, text="What is 2+3?", sent_at=now)
        ],
    }  # fmt: skip
    return RoundInput(**(values | fields))


def code(text: str) -> str:
    return f"<think>so</think>Let me see.\n```python\n{text}\n```"


def requests(tmp_path: Path) -> list[dict[str, Any]]:
    path = tmp_path / "requests.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def misfit(token: str, count: int, names: Sequence[str]) -> str | None:
    wanted = {"m1": 2, "m2": 1}[token]
    return None if count + len(names) == wanted else f"{wanted} arguments are wanted"


async def test_a_program_that_cannot_work_makes_no_call_and_all_of_it_is_said(play: Any) -> None:
    calls = Calls()
    outcome = await play(
        code("print(add(2, 3))\nadd(2)\nprint(totl)\nsearch()"), dispatch=calls, misfit=misfit
    )
    assert (outcome.report.stop_type, outcome.needs_follow_up, outcome.run) == (StopType.ERROR, True, None)
    assert calls.seen == []
    assert outcome.report.error == (
        "The program did not run, and no call was made, because this cannot work:\n"
        "line 2: 2 arguments are wanted\nline 3: name 'totl' is not defined\nline 4: 1 arguments are wanted"
    )
    outcome = await play(
        code("rows = [add(2, 3)]\nprint(rows, kept)"),
        dispatch=calls,
        misfit=misfit,
        variables=KeptVariables(values={"kept": "7"}),
    )
    assert (outcome.report.stop_type, outcome.report.output.strip()) == (StopType.NORMAL, "[5] 7")


async def test_a_program_that_ends_normally_ends_the_turn(play: Any) -> None:
    calls = Calls()
    outcome = await play(code("from plugins import add\nprint(add(2, 3))"), dispatch=calls)
    assert (outcome.report.stop_type, outcome.needs_follow_up, outcome.notice) == (
        StopType.NORMAL,
        False,
        None,
    )
    assert outcome.report.output.strip() == "5"
    assert (outcome.report.code, outcome.report.answer) == (
        "print(add(2, 3))",
        code("from plugins import add\nprint(add(2, 3))"),
    )
    assert calls.seen == [("m1", ((2, 3), {}))]
    assert outcome.run.calls == 1
    assert outcome.llm.model == "scripted"
    assert outcome.report.prompt_chars > 1000


async def test_an_agent_call_ends_the_program_and_the_next_round_reads_its_result(
    play: Any, tmp_path: Path
) -> None:
    calls = Calls()
    first = await play(code("print('before')\nsearch('rain')\nadd(1, 1)\nprint('after')"), dispatch=calls)
    assert (first.report.stop_type, first.needs_follow_up) == (StopType.AGENT, True)
    assert first.report.output.strip() == "before"
    assert [token for token, _ in calls.seen] == ["m2"]

    earlier = TurnRound(
        number=1, asked_at=datetime.now(UTC), answer=first.report.answer, stop_type=StopType.AGENT,
        reason=first.report.error, output=first.report.output, observations=(
            Observation(method="search", type=SandboxMethodType.AGENT, text="Rain at 5 pm.", call_id="c1"),
        ),
    )  # fmt: skip
    second = await play(
        {"when": "Rain at (5 pm)", "answer": code("print('${1}')")}, number=2, previous=[earlier]
    )
    assert (second.report.stop_type, second.report.output.strip()) == (StopType.NORMAL, "5 pm")
    roles = [message["role"] for message in requests(tmp_path)[-1]["messages"]]
    assert roles == ["system", "user", "assistant", "user"]


async def test_a_failing_program_leads_to_a_round_with_its_traceback(play: Any) -> None:
    outcome = await play(code("x = add('a', 'b')"))
    assert (outcome.report.stop_type, outcome.needs_follow_up) == (StopType.ERROR, True)
    assert "ValueError: no numbers" in outcome.report.output
    assert outcome.report.error.startswith("The program ended with an error (exit code 1)")


async def test_words_end_the_turn_and_are_not_recorded_before(play: Any) -> None:
    recorded: list[RoundReport] = []

    async def on_answer(report: RoundReport, _: LLMAnswer) -> None:
        recorded.append(report)

    outcome = await play("<think>so</think>I cannot do that for you.", on_answer=on_answer)
    assert (outcome.report.stop_type, outcome.needs_follow_up, outcome.run) == (StopType.NORMAL, False, None)
    assert (outcome.words, outcome.report.code) == ("I cannot do that for you.", None)
    assert recorded == []


async def test_a_call_of_a_known_method_needs_no_fence(play: Any) -> None:
    outcome = await play("print(add(2, 3))")
    assert (outcome.words, outcome.report.output.strip()) == (None, "5")


STRICT = AgentSettings(answers=AnswerMode.STRICT, rounds_per_turn=2)


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        ("I cannot do that for you.", "SyntaxError"),
        ("<tool_call>\n{}\n</tool_call>", "SyntaxError"),
        ("```html\n<b>\n```", "SyntaxError"),
        ("x = 5\nx / 0", "ZeroDivisionError"),
    ],
)
async def test_a_strict_round_runs_every_answer(play: Any, answer: str, error: str) -> None:
    outcome = await play(answer, agent=STRICT)
    assert (outcome.report.stop_type, outcome.needs_follow_up, outcome.words) == (StopType.ERROR, True, None)
    assert error in outcome.report.output


async def test_a_strict_round_without_a_program_does_not_end_the_turn(play: Any) -> None:
    outcome = await play("<think>hm, hm</think>", agent=STRICT)
    assert (outcome.report.stop_type, outcome.needs_follow_up, outcome.run) == (StopType.ERROR, True, None)
    assert "held no program" in outcome.report.error


async def test_exit_9_shows_the_output_to_the_model(play: Any) -> None:
    outcome = await play(code("print(41 + 1)\nexit(9)"))
    assert (outcome.report.stop_type, outcome.needs_follow_up) == (StopType.MANUAL, True)
    assert outcome.report.output.strip() == "42"


async def test_a_program_that_takes_too_long_is_stopped_within_the_rest_of_the_turn(play: Any) -> None:
    started = datetime.now(UTC) - timedelta(seconds=100)
    outcome = await play(
        code("print('on', flush=True)\nimport time\ntime.sleep(60)"),
        agent=AgentSettings(turn_seconds=106),
        turn_started_at=started,
    )
    assert (outcome.report.stop_type, outcome.needs_follow_up) == (StopType.TIMEOUT, True)
    assert outcome.report.output.strip() == "on"


async def test_an_empty_program_ends_the_turn(play: Any) -> None:
    outcome = await play(code("# not for me"))
    assert (outcome.report.stop_type, outcome.needs_follow_up, outcome.run) == (StopType.NORMAL, False, None)


async def test_reasoning_without_code_does_not_end_the_turn(play: Any) -> None:
    outcome = await play("<think>hm, hm</think>")
    assert (outcome.report.stop_type, outcome.needs_follow_up, outcome.run) == (StopType.ERROR, True, None)
    assert "was empty" in outcome.report.error


async def test_an_oversized_program_is_refused(play: Any) -> None:
    outcome = await play(code("x = '" + "a" * 300_000 + "'"))
    assert (outcome.report.stop_type, outcome.run) == (StopType.ERROR, None)
    assert "more than 200000 characters" in outcome.report.error


WORD = r"Check word, confidential: (\S+)"


@pytest.mark.parametrize(
    "program",
    ["print('${1}')", "add('${1}', 1)"],
)
async def test_code_with_the_check_word_does_not_run(play: Any, program: str) -> None:
    calls = Calls()
    outcome = await play({"when": WORD, "answer": code(program)}, dispatch=calls)
    assert (outcome.report.stop_type, outcome.needs_follow_up, outcome.run) == (StopType.SECURITY, True, None)
    assert calls.seen == []


SPLIT_WORD = r"Check word, confidential: (\S{5})(\S+)"


async def test_output_with_the_check_word_is_hidden_from_the_next_prompt(play: Any) -> None:
    outcome = await play({"when": SPLIT_WORD, "answer": code("print('${1}' + '${2}')")})
    assert (outcome.report.stop_type, outcome.report.output) == (StopType.SECURITY, "")


async def test_a_call_with_the_check_word_is_not_sent(play: Any) -> None:
    calls = Calls()
    program = "import threading\nadd(1, 2)\nadd('${1}' + '${2}', 1)\nadd(3, 4)"
    outcome = await play({"when": SPLIT_WORD, "answer": code(program)}, dispatch=calls)
    assert outcome.report.stop_type == StopType.SECURITY
    assert [args for _, args in calls.seen] == [((1, 2), {})]


async def test_every_round_has_its_own_check_word(play: Any, tmp_path: Path) -> None:
    await play(code("pass"))
    await play(code("pass"))
    first, second = (
        line["messages"][-1]["content"][0]["text"].rsplit(": ", 1)[1] for line in requests(tmp_path)
    )
    assert first != second


async def test_the_last_round_ends_the_turn_with_a_message_to_the_chat(play: Any) -> None:
    outcome = await play(code("exit(9)"), number=3, agent=AgentSettings(rounds_per_turn=3))
    assert (outcome.report.stop_type, outcome.needs_follow_up) == (StopType.MANUAL, False)
    assert "more than the 3 rounds" in outcome.notice


async def test_a_last_round_that_ends_normally_sends_no_message(play: Any) -> None:
    outcome = await play(code("print(1)"), number=3, agent=AgentSettings(rounds_per_turn=3))
    assert (outcome.report.stop_type, outcome.notice) == (StopType.NORMAL, None)


async def test_a_round_beyond_the_limit_calls_no_model(play: Any, tmp_path: Path) -> None:
    outcome = await play(code("print(1)"), number=4, agent=AgentSettings(rounds_per_turn=3))
    assert (outcome.report.stop_type, outcome.needs_follow_up, outcome.llm) == (None, False, None)
    assert "more than the 3 rounds" in outcome.notice
    assert requests(tmp_path) == []


async def test_a_round_after_the_turn_limit_calls_no_model(play: Any, tmp_path: Path) -> None:
    outcome = await play(
        code("print(1)"),
        agent=AgentSettings(turn_seconds=60),
        turn_started_at=datetime.now(UTC) - timedelta(seconds=60),
    )
    assert (outcome.report.stop_type, outcome.needs_follow_up) == (None, False)
    assert "more than the 60 seconds" in outcome.notice
    assert requests(tmp_path) == []


async def test_inject_methods_add_text_and_failing_ones_are_named_in_their_place(
    play: Any, tmp_path: Path
) -> None:
    async def speak() -> str:
        return "Quota: 3"

    async def fail() -> str:
        raise SystemExit("plugin says exit")

    async def hang() -> str:
        raise asyncio.CancelledError

    plugins = [
        PluginBrief(key=f"a.{inject.__name__}", name="x", module_name="x", methods=[], inject=inject)
        for inject in (speak, fail, hang)
    ]
    outcome = await play(code("print(1)"), plugins=plugins)
    assert outcome.report.stop_type == StopType.NORMAL
    text = requests(tmp_path)[0]["messages"][-1]["content"][0]["text"]
    assert '<plugin_context plugin="a.speak">\nQuota: 3\n' in text
    assert (
        '<plugin_context plugin="a.fail">\n[this plugin\'s context is missing: SystemExit: plugin says exit]'
        in text
    )
    assert '<plugin_context plugin="a.hang">\n[this plugin\'s context is missing: CancelledError: ]' in text


async def test_an_error_of_the_model_is_raised_to_the_caller(play: Any) -> None:
    with pytest.raises(LLMError, match="none of its 1 answers fits"):
        await play({"when": "something else", "answer": "x"})


class Answering:
    """A model with a given answer and given metadata of the endpoint."""

    def __init__(self, text: str, finish_reason: str = "stop") -> None:
        self.asked = asyncio.Event()
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self._answer = LLMAnswer(
            text=text,
            model="m",
            prompt_tokens=1,
            answer_tokens=1,
            finish_reason=finish_reason,
            tries=1,
            cost=0,
        )

    async def complete(self, request: LLMRequest) -> LLMAnswer:
        self.asked.set()
        await self.may_answer.wait()
        return self._answer

    async def close(self) -> None:
        pass


async def test_a_truncated_program_does_not_run(sandbox: SandboxManager) -> None:
    cut = Answering("```python\nadd(1, 2)\nadd(3,", finish_reason="length")
    calls = Calls()
    outcome = await runner(cut, sandbox).run(round_input(dispatch=calls))
    assert (outcome.report.stop_type, outcome.needs_follow_up, calls.seen) == (StopType.ERROR, True, [])
    assert "cut off" in outcome.report.error


async def test_a_complete_program_before_a_truncated_end_runs(sandbox: SandboxManager) -> None:
    cut = Answering(f"{code('print(1)')}\nThis means that", finish_reason="length")
    outcome = await runner(cut, sandbox).run(round_input())
    assert outcome.report.stop_type == StopType.NORMAL


async def test_a_model_that_uses_up_the_time_of_the_turn_ends_it(sandbox: SandboxManager) -> None:
    slow = Answering("x")
    slow.may_answer.clear()
    given = round_input(turn_started_at=datetime.now(UTC) - timedelta(seconds=9))
    outcome = await runner(slow, sandbox, AgentSettings(turn_seconds=10.2)).run(given)
    assert (outcome.report.stop_type, outcome.needs_follow_up) == (None, False)
    assert "more than the 10.2 seconds" in outcome.notice


async def test_a_cancelled_round_cancels_its_calls(sandbox: SandboxManager) -> None:
    called, cancelled = asyncio.Event(), asyncio.Event()

    async def hang(_: StubCall) -> StubResult:
        called.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()
        raise AssertionError("unreachable")

    running = asyncio.create_task(
        runner(Answering(code("add(1, 2)")), sandbox).run(round_input(dispatch=hang))
    )
    await asyncio.wait_for(called.wait(), WAIT_SECONDS)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert cancelled.is_set()


async def test_a_program_stopped_by_an_operator_is_not_run_again(sandbox: SandboxManager) -> None:
    called = asyncio.Event()

    async def hang(_: StubCall) -> StubResult:
        called.set()
        await asyncio.Event().wait()
        raise AssertionError("unreachable")

    running = asyncio.create_task(
        runner(Answering(code("add(1, 2)")), sandbox).run(round_input(dispatch=hang))
    )
    await asyncio.wait_for(called.wait(), WAIT_SECONDS)
    assert sandbox.stop("r1")
    outcome = await running
    assert (outcome.report.stop_type, outcome.needs_follow_up) == (StopType.MANUAL, False)


async def test_the_answer_is_recorded_before_its_code_runs(play: Any) -> None:
    calls, recorded = Calls(), []

    async def on_answer(report: RoundReport, answer: LLMAnswer) -> None:
        recorded.append((report.code, (report.prompt_chars or 0) > 0, answer.model, list(calls.seen)))

    await play(code("add(2, 3)"), dispatch=calls, on_answer=on_answer)
    assert recorded == [("add(2, 3)", True, "scripted", [])]
    assert len(calls.seen) == 1


async def test_code_does_not_run_when_its_answer_cannot_be_recorded(play: Any) -> None:
    calls = Calls()

    async def refuse(_: RoundReport, __: LLMAnswer) -> None:
        raise FencedError("the chat passed to another worker")

    with pytest.raises(FencedError):
        await play(code("add(2, 3)"), dispatch=calls, on_answer=refuse)
    assert calls.seen == []
