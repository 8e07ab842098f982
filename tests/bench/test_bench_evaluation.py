"""The evaluation: its arithmetic, its page, tasks on a running system, and failures that it must report."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from chat_server import ChatServer, complete
from waiting import WAIT_SECONDS

from benchmarks.evaluation.__main__ import chosen, evaluate, main, parse
from benchmarks.evaluation.checks import delivers, has_effect, sends, sends_nothing
from benchmarks.evaluation.figures import Failure, FailureKind, Played, Run, as_data, ratio, summary
from benchmarks.evaluation.page import Taken, as_markdown
from benchmarks.evaluation.run import opened
from benchmarks.evaluation.script import Script, tokens_of_answer, tokens_of_request
from benchmarks.evaluation.task import Delivered, Effect, Seen, Task, call, program, says, words
from benchmarks.evaluation.tasks import GROUPS
from benchmarks.harness.machine import describe_machine
from broker_config.settings import Settings

pytestmark = pytest.mark.extended

PAGE = Path(__file__).parents[2] / "docs" / "evaluation.md"
RUN = Run(seconds=2.0, rounds=2, requests=3, prompt_tokens=100, completion_tokens=10, cost=0.5, new_tokens=60)
FAILED = replace(RUN, seconds=9.0, failures=(Failure(kind=FailureKind.OUTCOME, text="no | file"),))


def taken(*played: Played) -> Taken:
    return Taken(
        played=played,
        machine=describe_machine("7.0"),
        command="make eval",
        date="2026-05-01",
        model="scripted",
        methods=45,
        has_model_time=False,
    )


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def test_a_summary_adds_up_and_counts_failed_tasks() -> None:
    found = summary([RUN, FAILED, replace(RUN, seconds=4.0)])
    assert (found.tasks, found.passed, found.rounds, found.requests) == (3, 2, 6, 9)
    assert (found.prompt_tokens, found.completion_tokens, found.cost, found.new_tokens) == (300, 30, 1.5, 180)
    assert (found.median_seconds, found.max_seconds) == (4.0, 9.0)
    assert found.failures == {"outcome": 1}
    assert summary([RUN, replace(RUN, new_tokens=None)]).new_tokens is None
    assert ratio(1, 4) == 0.25 and ratio(1, 0) is None
    with pytest.raises(ValueError, match="no run"):
        summary([])


def test_tables_have_groups_totals_ratios_and_failures() -> None:
    tools = replace(RUN, requests=12, prompt_tokens=400, completion_tokens=5, new_tokens=80)
    one = Played(group="files", task="sum", programs=RUN, tools=tools)
    two = Played(group="jobs", task="report", programs=FAILED, tools=tools)
    text = as_markdown(taken(one, two))
    assert "| files | 1 | 1 | 2 | 3 | 100 | 60 | 10 | 0.5000 | 2.00 | 2.00 |  |" in text
    assert "| **all** | 2 | 1 | 4 | 6 | 200 | 120 | 20 | 1.0000 | 5.50 | 9.00 | 1 outcome |" in text
    assert "| **all** | 2 | 2 | 24 | 800 | 160 | 10 | 1.0000 | 2.00 | 2.00 |  |" in text
    assert "| **all** | 0.25 | 0.25 | 0.75 | 2.00 | 0.27 |" in text
    assert "- `jobs/report` by programs: outcome: no \\| file" in text
    alone = as_markdown(taken(replace(one, tools=None)))
    assert "Classic" not in alone and "failed" not in alone
    assert json.loads(json.dumps(as_data([two])))[0]["programs"]["failures"][0]["kind"] == "outcome"


def test_an_answer_needs_what_the_prompt_must_show_and_takes_values_from_it() -> None:
    replies = [
        words("Look."),
        call("read", '{"id": "${id}"}', after=r"id=(?P<id>\w+)"),
        words("It is ${id}."),
    ]
    script = Script(replies=replies, newest="Find it")
    assert script.next([user("please: Find it")]) == {"content": "Look."}
    assert script.next([user("id=7")])["tool_calls"][0]["function"]["arguments"] == '{"id": "7"}'  # type: ignore[index]
    assert script.next([{"role": "tool", "content": "error: no"}]) is None
    assert script.left == 1 and "does not show" in script.faults[0]
    assert script.next([{"role": "tool", "content": "7"}]) == {"content": "It is 7."}
    assert script.next([user("Find it")]) is None and "has 3 answers" in script.faults[1]
    picture = Script(replies=[words("Red.", images=1)], newest="")
    assert picture.next([user("look")]) is None and "0 pictures" in picture.faults[0]


def test_tokens_of_a_request_grow_with_tools_calls_and_pictures() -> None:
    plain = {"messages": [user("hello there")]}
    made = {"content": None, "tool_calls": [{"function": {"name": "read", "arguments": '{"a": 1}'}}]}
    alone = tokens_of_request(plain)
    assert 4 < alone < 12 and tokens_of_answer(made) > 3
    assert tokens_of_request({**plain, "tools": [{"type": "function"}]}) > alone
    assert tokens_of_request({"messages": [user("hello there"), {"role": "assistant", **made}]}) > alone + 4
    seen = [{"type": "text", "text": "hello there"}, {"type": "image_url", "image_url": {"url": "https://x"}}]
    assert tokens_of_request({"messages": [{"role": "user", "content": seen}]}) > alone + 1000
    script = Script(replies=[])
    script.count_new(plain)
    first = script.new_tokens
    script.count_new({"messages": [*plain["messages"], user("and more")]})
    assert first < script.new_tokens < 2 * first + 4


def test_checks_say_what_is_missing() -> None:
    seen = Seen(
        texts=["The sum is 7."],
        files=[Delivered(name="a.csv", media_type="text/csv", content=b"x")],
        effects=[Effect(kind="order", fields={"sku": "A", "count": 2})],
    )
    assert sends("SUM", r"\b7\b")(seen) is None and "no message has 8" in str(sends("8")(seen))
    assert sends_nothing()(Seen()) is None and sends_nothing()(seen) is not None
    assert delivers(r"\.csv$", lambda content: content == b"x")(seen) is None
    assert "a.csv (1 bytes)" in str(delivers(r"\.csv$", lambda content: content == b"y")(seen))
    assert has_effect("order", sku="A")(seen) is None
    assert "1 effects" in str(has_effect("order", times=2)(seen))


def test_sixty_tasks_have_names_of_their_own_and_two_scripts() -> None:
    tasks = [task for group in GROUPS.values() for task in group]
    assert len(tasks) == len({task.name for task in tasks}) == 60
    assert all(task.model and task.tools and task.outcome and task.person for task in tasks)
    assert [len(group) for group in chosen(["jobs", "errors/no_network"]).values()] == [1, 5]
    with pytest.raises(ValueError, match="no group or task 'nothing'"):
        chosen(["nothing"])


def test_usage_errors_end_with_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        parse(["--only", "nothing"])
    assert "--list lists them" in capsys.readouterr().err
    assert main(["--list", "--only", "jobs/report"]) == 0
    assert capsys.readouterr().out == "jobs/report\n"


def test_the_page_has_a_run_of_all_tasks() -> None:
    """`make eval` writes it; figures differ from machine to machine."""
    text = PAGE.read_text("utf-8")
    figures = text.partition("<!-- figures: begin -->")[2].partition("<!-- figures: end -->")[0]
    assert "`make eval EVAL_ARGS='--write docs/evaluation.md'`" in figures
    for group, tasks in GROUPS.items():
        assert figures.count(f"\n| {group} | {len(tasks)} | ") == 2, group
        assert figures.count(f"\n| {group} | ") == 3, group
    assert figures.count("\n| **all** | 60 | 60 | ") == 2 and "What failed" not in figures


async def test_tasks_pass_both_ways_and_broken_ones_fail() -> None:
    """One system for all: its start takes longer than the tasks."""
    tasks = {f"{group}/{task.name}": task for group, found in GROUPS.items() for task in found}
    names = ["files/sum_of_prices", "lookups/ask_the_handbook", "errors/misspelt_name"]
    names += ["pictures/see_an_upload", "jobs/report", "approvals/approved_payment"]
    settings = Settings.load(env_file=None)
    async with opened(settings, scripted=True, limit_seconds=WAIT_SECONDS) as bench:

        async def play(task: Task) -> tuple[list[FailureKind], list[FailureKind]]:
            played = await bench.play("group", task, with_tools=True)
            assert played.tools is not None
            return tuple([each.kind for each in run.failures] for run in (played.programs, played.tools))  # type: ignore[return-value]

        for name in names:
            played = await bench.play("group", tasks[name], with_tools=True)
            assert played.tools is not None
            assert (played.programs.failures, played.tools.failures) == ((), ()), name
            assert played.programs.requests == len(tasks[name].model) <= played.programs.rounds, name
            assert played.tools.requests == len(tasks[name].tools), name
            assert played.programs.prompt_tokens >= (played.programs.new_tokens or 0) > 0

        good = tasks["files/sum_of_prices"]
        # People see another sum than the task wants.
        assert await play(replace(good, outcome=[sends("99")])) == (
            [FailureKind.OUTCOME],
            [FailureKind.OUTCOME],
        )
        # The system shows something else than the next answer depends on.
        look = program("print(6 * 7)\nexit(9)")
        lost = Task(
            name="lost",
            person=[says("What is 6 * 7?")],
            model=[look, words("It is 42.", after="<sandbox_output>\n41")],
            tools=[call("calculate", {"expression": "6 * 7"}), words("It is 42.", after="41")],
            outcome=[],
        )
        assert await play(lost) == (
            [FailureKind.PROMPT, FailureKind.TURN],
            [FailureKind.PROMPT, FailureKind.ERROR],
        )
        # An answer too many, and a call without a decision.
        more = replace(good, model=[*good.model, words("More.")], tools=[*good.tools, words("More.")])
        assert await play(more) == ([FailureKind.UNUSED], [FailureKind.UNUSED])
        undecided = replace(tasks["approvals/approved_payment"], decisions=[])
        ours, theirs = await play(undecided)
        assert FailureKind.OUTCOME in ours and FailureKind.OUTCOME in theirs


async def test_a_real_model_plays_the_same_tasks_in_its_own_words() -> None:
    """Its requests, tokens and costs are those of its endpoint; the scripts are not used."""
    sum_of = {"name": "eval__paper__calculate", "arguments": '{"expression": "17*86400+5*3600+3*60"}'}
    calls = [{"id": "c1", "type": "function", "function": sum_of}]
    answers = [
        complete("Good evening."),  # greet: by programs, then by tools
        complete("You are most welcome here!"),
        complete("```python\nprint(17 * 86400 + 5 * 3600 + 3 * 60)\nexit(9)\n```"),
        complete("That makes 1,486,980 seconds."),
        complete(None, "tool_calls", tool_calls=calls),
        complete("1 486 980, I think."),
    ]
    async with ChatServer(answers) as server:
        settings = Settings.load(
            env_file=None,
            llm={
                "base_url": server.base_url,
                "model": "m",
                "stream": False,
                "input_price_per_million": 2.0,
                "output_price_per_million": 10.0,
            },
        )
        names = ("--only", "answers/greet", "--only", "answers/think_and_compute")
        found = await evaluate(parse([*names, "--seconds", str(WAIT_SECONDS)]), settings, "make eval")
        assert len(server.seen) == 6 and "tools" not in server.seen[2].body and server.seen[4].body["tools"]
    assert found.model == "m" and found.has_model_time
    greeted, computed = found.played
    assert computed.tools is not None and greeted.tools is not None
    assert computed.programs.passed and computed.tools.passed and computed.programs.new_tokens is None
    for run in (computed.programs, computed.tools):
        assert (run.requests, run.prompt_tokens, run.completion_tokens) == (2, 2000, 400)
        assert run.cost == pytest.approx(2000 * 2e-6 + 400 * 1e-5)
    assert [failure.kind for failure in greeted.programs.failures] == [FailureKind.OUTCOME]
    assert greeted.tools.passed
    assert "seconds: median" in as_markdown(found).rpartition("Programs divided")[2]


def test_a_failed_task_makes_the_command_fail(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The whole command, with its JSON and its page."""
    monkeypatch.chdir(tmp_path)
    greet, *_ = GROUPS["answers"]
    refused = replace(greet, name="refused", outcome=[sends("goodbye")])
    monkeypatch.setattr("benchmarks.evaluation.__main__.GROUPS", {"answers": [greet, refused]})
    page, data = tmp_path / "page.md", tmp_path / "eval.json"
    page.write_text("a\n<!-- figures: begin -->\nold\n<!-- figures: end -->\nb\n")
    assert main(["--scripted", "--no-tools", "--write", str(page), "--json", str(data)]) == 1
    written = page.read_text()
    assert "old" not in written and "| answers | 2 | 1 | 2 | 2 |" in written and "1 outcome" in written
    assert written.startswith("a\n") and written.endswith("b\n") and written.count("What failed") == 1
    kept = json.loads(data.read_text())
    assert [task["programs"]["failures"] == [] for task in kept["tasks"]] == [True, False]
    assert "answers/refused: programs FAILED" in capsys.readouterr().err
