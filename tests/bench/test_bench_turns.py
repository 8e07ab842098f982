"""Whole turns: the scripted model, the subprocess of peers, the sums over processes, and a short run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import turns
from benchmarks.agents.code_process import block_of, run_code
from benchmarks.agents.methods import TOOLS
from benchmarks.agents.script import TurnModel, answer_to, new_mark, question_of
from benchmarks.harness.usage import tree_cpu_seconds, tree_pss_bytes, tree_rss_bytes


async def reply(*texts: str) -> str:
    body = {"messages": [{"role": "user", "content": text} for text in texts]}
    _, answer = await TurnModel().answer(body)
    return str(answer["choices"][0]["message"]["content"])


async def test_the_model_answers_the_newest_question_with_code_and_then_with_words() -> None:
    old, mark = new_mark(), new_mark()
    before = (question_of(old), f"found 3 for {old}", answer_to(old), question_of(mark))
    code = await reply(*before)
    assert f'measure(1, "{mark}")' in code
    assert await reply(*before, code, f"found 3 for {mark}") == answer_to(mark)


async def test_the_model_ends_a_turn_of_smolagents_by_a_call() -> None:
    mark = new_mark()
    said = await reply("end with final_answer", question_of(mark), f"found 3 for {mark}")
    assert block_of(said) == f'final_answer("{answer_to(mark)}")\n'


async def test_a_prompt_without_a_question_is_refused() -> None:
    status, _ = await TurnModel().answer({"messages": [{"role": "user", "content": "hello"}]})
    assert status == 400


async def test_code_of_a_peer_runs_in_a_process_whose_calls_come_back() -> None:
    mark = new_mark()
    code = block_of(await reply(question_of(mark)))
    assert code is not None
    assert await run_code(code, TOOLS) == f"found 3 for {mark}\n"


async def test_failing_code_of_a_peer_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="ended with 1"):
        await run_code("measure(", TOOLS)


def test_sums_over_a_system_include_processes_below_and_those_that_ended() -> None:
    burn = "import time\nwhile time.process_time() < 0.3: pass\n"
    program = (
        f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {burn!r}])\n"
        "below = subprocess.Popen([sys.executable, '-c', 'input()'], stdin=subprocess.PIPE)\n"
        "print('ready', flush=True)\ninput()\nbelow.communicate(b'x')\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as system:
        assert system.stdout is not None and system.stdout.readline() == b"ready\n"
        # The kernel counts whole ticks of a process, of its own time and of the system's.
        assert tree_cpu_seconds([system.pid]) >= 0.25
        assert 0 < tree_pss_bytes([system.pid]) <= tree_rss_bytes([system.pid])
        system.communicate(b"x\n")
    assert tree_rss_bytes([system.pid]) == 0


def test_a_system_that_is_not_installed_is_reported_as_such(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("benchmarks.agents.systems._PEERS", tmp_path)
    assert turns.main(["--quick", "--only", "langgraph"]) == 1
    assert "langgraph: not measured: not installed (make agent-peers)" in capsys.readouterr().out


def measured(tmp_path: Path, name: str) -> dict[str, Any]:
    path = tmp_path / "figures.json"
    turns.main(["--quick", "--only", name, "--json", str(path)])
    found = json.loads(path.read_text("utf-8"))[name]
    if found["absent"] is not None and found["absent"].startswith(("not installed", "docker")):
        pytest.skip(found["absent"])
    assert found["absent"] is None
    (figures,) = found["repetitions"]
    assert isinstance(figures, dict)
    return figures


def is_complete(figures: dict[str, Any]) -> bool:
    # The turn of each system asks the model twice. A system without turns may need no processor time.
    return figures["model_requests_per_turn"] == 2 and all(
        value for name, value in figures.items() if name != "idle_cpu_share"
    )


@pytest.mark.extended
@pytest.mark.parametrize("name", ["nekro-sqlite", "nekro-postgresql"])
def test_one_run_of_our_system_gives_every_figure(tmp_path: Path, name: str) -> None:
    assert is_complete(measured(tmp_path, name))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["langgraph", "smolagents-local", "smolagents-docker", "temporal"])
def test_one_run_of_a_peer_gives_every_figure(tmp_path: Path, name: str) -> None:
    assert is_complete(measured(tmp_path, name))
