"""Saved cases, and other models asked the same: real turns, a model over HTTP, cases in files."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import yaml
from chat_server import Behaviour, ChatServer, complete
from round_bench import Bench

from broker_config.settings import Settings
from nekro.agent.llm.clients import create_models
from nekro.app.budgets import day_of
from nekro.app.rounds.cases import Case, CaseResult, find_cases, read_case, run_cases, write_case
from nekro.app.rounds.replays import Difference
from nekro.app.rounds.turn_replays import ModelReplay
from nekro.cli.output import Output
from nekro.cli.views.replays import asked_json, show_asked
from nekro_agent.errors import BudgetExceededError, ModelGroupError, NotFoundError, UsageError
from storage.accounts.spendings import ScopeKey
from storage.states import BudgetScope

OpenBench = Callable[..., Awaitable[Bench]]
FIRST = """
import random, time
names = [tick(name) for name in ("a", "a", "b")]
try:
    break_down("hard")
except MethodError as exc:
    print(exc)
keep("naïve\\n" + str(random.random()))
print(names, {"x", "y", "z"}, time.time())
total = 7
look("tea")
"""
SECOND = 'send_msg_text(_ck, "done")\nprint(total)'


def nekro(*arguments: str, directory: Path) -> tuple[int, str, str]:
    """Run a command; returns exit code, stdout and stderr."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("NEKRO_")}
    done = subprocess.run(
        [sys.executable, "-P", "-m", "nekro.cli.main", *arguments],
        cwd=directory, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


def program(code: str) -> Behaviour:
    return complete(f"```python\n{code}\n```")


async def played(open_bench: OpenBench, server: ChatServer, **groups: Any) -> tuple[Bench, str]:
    """Play a turn with the models of the settings; returns its id."""
    bench = await open_bench(
        "sqlite",
        llm={"base_url": server.base_url, "model": "large", "stream": False, "tries": 1},
        models={"cheap": {"model": "small"}, "vectors": {"model": "v", "embedding": True}},
        agent={"lease_seconds": 30, "keep_prompts": True, **groups.pop("agent", {})},
        sandbox={"keep_variables": True},
        **groups,
    )
    await bench.say("chat", "hello")
    models = create_models(bench.settings)
    try:
        rounds = await bench.play("chat", bench.drain(models))  # type: ignore[arg-type]
    finally:
        await models.close()
    return bench, rounds[0].turn_id


async def save(bench: Bench, turn_id: str, path: Path) -> None:
    async with bench.services.replayer() as replayer:
        await replayer.save(await replayer.replay(turn_id), path)


async def ask(bench: Bench, turn_id: str, group: str = "cheap") -> ModelReplay:
    async with bench.services.replayer() as replayer:
        return await replayer.ask(turn_id, group)


async def evaluated(path: Path, tmp_path: Path) -> CaseResult:
    """Run a case on an installation that knows nothing of the turn."""
    settings = Settings.load(
        env_file=None, data_dir=tmp_path / "elsewhere", broker={"url": "redis://nowhere"}
    )
    (result,) = await run_cases(settings, [path])
    assert not (tmp_path / "elsewhere").exists()
    return result


def differences(result: CaseResult) -> list[tuple[int, str, int | None]]:
    return [
        (program.number, one.kind, one.line) for program in result.programs for one in program.differences
    ]


async def test_a_saved_case_runs_anywhere_and_finds_what_differs(
    open_bench: OpenBench, tmp_path: Path
) -> None:
    async with ChatServer([program(FIRST), program(SECOND)]) as server:
        bench, turn_id = await played(open_bench, server)
        path = tmp_path / "cases" / "tea.yaml"
        journal, said = bench.journal(), len(await bench.messages("chat"))
        await save(bench, turn_id, path)
        assert len(server.seen) == 2 and bench.journal() == journal
        assert len(await bench.messages("chat")) == said
    with pytest.raises(UsageError, match="exists already"):
        await save(bench, turn_id, path)
    text = path.read_text("utf-8")
    assert str(bench.settings.data_dir) not in text and "test-signing-key" not in text
    assert "\n- code: |" in text and "    - [a]\n" in text and 'keep("naïve' in text, (
        "people read and edit it"
    )
    case = yaml.safe_load(text)
    first, second = case["programs"]
    assert [call["method"].rpartition(".")[2] for call in first["calls"]] == [
        "tick", "tick", "tick", "break_down", "keep", "look",
    ]  # fmt: skip
    assert first["calls"][0]["arguments"] == [["a"], {}] and first["calls"][0]["value"] == "a"
    assert "raises" in first["calls"][3] and first["calls"][5]["stops"] == "AGENT"
    assert (first["ends"], second["ends"], second["output"]) == ("AGENT", "NORMAL", "7\n")
    assert (await evaluated(path, tmp_path)).is_same

    first["calls"][2]["value"] = "changed"
    first["code"] = first["code"].replace("total = 7", "total = 8")
    second["code"] = second["code"].replace('"done"', '"otherwise"')
    path.write_text(yaml.safe_dump(case), "utf-8")
    result = await evaluated(path, tmp_path)
    assert differences(result) == [
        (1, "output", None), (2, "call", 1), (2, "missing", None), (2, "end", None), (2, "output", None),
    ]  # fmt: skip
    assert "-['a', 'a', 'b']" in (shown := result.programs[0].differences[0].text)
    assert "+['a', 'a', 'changed']" in shown
    code, out, _ = await asyncio.to_thread(nekro, "eval", str(path), directory=tmp_path)
    assert code == 1 and "call (line 1): " in out and "0 of 1 cases are the same" in out
    code, out, _ = await asyncio.to_thread(nekro, "eval", "cases", "--json", directory=tmp_path)
    assert code == 1 and [one["is_same"] for one in json.loads(out)["cases"]] == [False]


async def test_a_case_has_no_secret(open_bench: OpenBench, tmp_path: Path) -> None:
    async with ChatServer([program('print(tick("test-signing-key"))')]) as server:
        bench, turn_id = await played(open_bench, server)
    await save(bench, turn_id, tmp_path / "case.yaml")
    case = read_case(tmp_path / "case.yaml")
    assert case.programs[0].output == "[secret]\n" and case.programs[0].calls[0].value == "[secret]"
    assert (await evaluated(tmp_path / "case.yaml", tmp_path)).is_same


async def test_a_turn_that_needs_a_secret_or_differs_is_not_saved(
    open_bench: OpenBench, tmp_path: Path
) -> None:
    path = tmp_path / "case.yaml"
    async with ChatServer([program('print(len("test-signing-key"))')]) as server:
        bench, turn_id = await played(open_bench, server)
    with pytest.raises(UsageError, match="its case differs when it is run"):
        await save(bench, turn_id, path)
    async with ChatServer([program('tick("x" * 5000)')]) as server:
        bench, turn_id = await played(open_bench, server)
    with pytest.raises(UsageError, match="differ from what is recorded"):
        await save(bench, turn_id, path)
    async with ChatServer([complete("Hello to you")]) as server:
        bench, turn_id = await played(open_bench, server)
    with pytest.raises(UsageError, match="has no program"):
        await save(bench, turn_id, path)
    assert not path.exists()


PROGRAM = {"code": "print(1)", "seed": "0" * 64, "ends": "NORMAL", "output": "1\n"}
CASE = {"version": 1, "chat_key": "c", "programs": [PROGRAM]}
#: Each value has ten times the one before it.
LAUGHS = "".join(f"a{n}: &a{n} [{','.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 12)).encode()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "it has no `version`"),
        (b"- 1\n", "it has no `version`"),
        (b"version: yes\nprograms: [", "it is not YAML"),
        (b"\xff\xfe\x00", "it is not YAML"),
        (b"version: one", "it has no `version`"),
        (b"version: 1\nprograms: &a [*a]", "what its aliases refer to is without end or too large"),
        (b"version: 1\na0: &a0 x\n" + LAUGHS, "what its aliases refer to is without end or too large"),
        ({**CASE, "version": 2, "more": 1}, "version 2, and this release reads up to 1"),
        ({**CASE, "version": 0}, "version: "),
        ({**CASE, "programs": []}, "programs is empty"),
        ({**CASE, "more": 1}, "more: Extra inputs"),
        ({**CASE, "programs": [{**PROGRAM, "ends": "WELL"}]}, "'WELL' is none of NORMAL"),
        ({**CASE, "programs": [{**PROGRAM, "seed": "secret"}]}, "case: programs.0.seed: String should"),
        (
            {**CASE, "programs": [{**PROGRAM, "calls": [{"method": "a.b", "type": "tool"}]}]},
            "give one of value, raises and stops",
        ),
    ],
)
def test_a_file_that_is_no_case_is_named(
    content: bytes | dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = tmp_path / "case.yaml"
    path.write_bytes(content if isinstance(content, bytes) else yaml.safe_dump(content).encode())
    with pytest.raises(UsageError) as caught:
        read_case(path)
    assert str(path) in str(caught.value) and message in str(caught.value)
    assert ": Tuple should have" not in str(caught.value), "a faulty program is not a missing one too"


def test_a_case_reads_as_it_was_written(tmp_path: Path) -> None:
    odd = ["Oslo\nx", "\x85", "\x00\x1b\r\n", "é \u2028 😀", "yes", "2020-01-01", " \n\n", "", "- a: #b"]
    values = [*odd, 1.5, -0.0, 1e300, 10**30, None, True, {text: [text] for text in odd}]
    calls = [{"method": "a.b", "type": "tool", "arguments": [odd, {}], "value": values}]
    programs = [{**PROGRAM, "code": text, "output": text, "calls": calls} for text in odd]
    case = Case.model_validate({**CASE, "programs": programs})
    write_case(case, tmp_path / "case.yaml")
    assert read_case(tmp_path / "case.yaml") == case
    with pytest.raises(UsageError, match=r"ends in \.yaml or \.yml"):
        write_case(case, tmp_path / "case.json")


async def test_the_case_of_the_page_runs(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "replay.md").read_text("utf-8")
    (text,) = re.findall(r"^```yaml\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    (tmp_path / "case.yaml").write_text(text, "utf-8")
    assert (await evaluated(tmp_path / "case.yaml", tmp_path)).is_same


def test_cases_are_found_by_file_and_directory(tmp_path: Path) -> None:
    for name in ("a/2.yaml", "a/1.yml", "a/b/3.yaml", "a/notes.txt", "other"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    found = find_cases([tmp_path / "other", tmp_path / "a", tmp_path / "a" / "1.yml"])
    assert [path.relative_to(tmp_path).as_posix() for path in found] == [
        "other", "a/1.yml", "a/2.yaml", "a/b/3.yaml",
    ]  # fmt: skip
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match="has no case"):
        find_cases([tmp_path / "empty"])
    with pytest.raises(UsageError, match="No such file"):
        read_case(tmp_path / "missing.yaml")
    with pytest.raises(UsageError, match="Is a directory"):
        read_case(tmp_path / "a")


def test_the_fixture_fails_a_test_whose_case_differs(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text('pytest_plugins = ["nekro_agent.testing.cases"]\n')
    (tmp_path / "good.yaml").write_text(yaml.safe_dump(CASE))
    changed = {**CASE, "programs": [{**PROGRAM, "output": "2\n"}]}
    (tmp_path / "bad.yaml").write_text(yaml.safe_dump(changed))
    (tmp_path / "test_cases.py").write_text(
        "def test_good(replay_case):\n    replay_case('good.yaml')\n\n\n"
        "async def test_bad(replay_case):\n    replay_case('bad.yaml')\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "asyncio_mode=auto", "."],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert "1 failed, 1 passed" in done.stdout, done.stdout
    assert "bad.yaml: program 1: output: " in done.stdout and "-2" in done.stdout


async def test_another_model_is_asked_the_same(
    open_bench: OpenBench, capsys: pytest.CaptureFixture[str]
) -> None:
    other = FIRST.replace('"a", "a", "b"', '"a", "b"').replace("keep(", 'tick("new")\nkeep(')
    answers = [program(FIRST), program(SECOND), program(other), complete("All is done.")]
    async with ChatServer(answers) as server:
        bench, turn_id = await played(open_bench, server)
        journal, said = bench.journal(), await bench.messages("chat")
        found = await ask(bench, turn_id)
        sent = [request.body for request in server.seen]
    assert [body["model"] for body in sent] == ["large", "large", "small", "small"]
    assert "hello" in json.dumps(sent[2]["messages"]) and "hello" in json.dumps(sent[0]["messages"])
    assert bench.journal() == journal and await bench.messages("chat") == said
    first, second = found.rounds
    assert first.program is not None and first.code != first.code_before and not found.is_same
    assert [(one.kind, one.line) for one in first.differences][:1] == [("call", 7)]
    assert first.program.answered == 3, "the calls that the recorded program made too"
    assert second.words == "All is done." and second.differences == [
        Difference(kind="words", text="a message, and before a program")
    ]
    assert first.sent_chars == first.prompt_chars
    show_asked(first, Output())
    assert "cheap (small-real, 1000 + 200 tokens): another program" in "".join(capsys.readouterr())
    assert json.dumps([asked_json(one) for one in found.rounds])


async def test_a_model_that_does_the_same_does_not_differ(open_bench: OpenBench) -> None:
    answers = [program(SECOND.replace("total", "7")), program("# the same\n" + SECOND.replace("total", "7"))]
    async with ChatServer(answers) as server:
        bench, turn_id = await played(open_bench, server)
        found = await ask(bench, turn_id, "CHEAP")
    assert found.is_same and found.group == "cheap" and found.rounds[0].code != found.rounds[0].code_before


async def test_a_method_that_the_turn_did_not_call_is_known_and_not_run(open_bench: OpenBench) -> None:
    async with ChatServer([program("print(1)"), program('keep("x")')]) as server:
        bench, turn_id = await played(open_bench, server)
        found = await ask(bench, turn_id)
    assert [one.kind for one in found.rounds[0].differences] == ["call", "end", "output"]
    assert "tests.scene.keep" in found.rounds[0].differences[0].text and bench.journal() == ["heard hello"]


async def test_errors_of_asking_another_model_are_clear(open_bench: OpenBench) -> None:
    async with ChatServer([program("print(1)")]) as server:
        bench, turn_id = await played(open_bench, server, budgets={"chat": "rounds=100,tokens=1201"})
        with pytest.raises(ModelGroupError, match="there is no model group 'large'"):
            await ask(bench, turn_id, "large")
        with pytest.raises(ModelGroupError, match="cannot answer chats"):
            await ask(bench, turn_id, "vectors")
        with pytest.raises(NotFoundError, match="there is no turn"):
            await ask(bench, "nothing")
        assert (await ask(bench, turn_id)).is_same
        with pytest.raises(BudgetExceededError):
            await ask(bench, turn_id)
        assert len(server.seen) == 2
        bench, turn_id = await played(open_bench, server, agent={"keep_prompts": False})
        with pytest.raises(NotFoundError, match="NEKRO_AGENT__KEEP_PROMPTS=true"):
            await ask(bench, turn_id)


async def test_a_request_is_counted_on_the_chat(open_bench: OpenBench) -> None:
    async with ChatServer([program("print(1)")]) as server:
        bench, turn_id = await played(open_bench, server)
        await ask(bench, turn_id)
    today = day_of(datetime.now(UTC))
    async with bench.database.read() as tx:
        totals = await tx.spendings.totals([
            ScopeKey.of(BudgetScope.CHAT, "chat", day=today),
            ScopeKey.of(BudgetScope.TURN, turn_id, day=today),
        ])  # fmt: skip
    assert {total.scope: (total.tokens, total.rounds) for total in totals} == {
        "chat": (2400, 1),
        "turn": (1200, 1),
    }
