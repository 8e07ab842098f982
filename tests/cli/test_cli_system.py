"""Real commands as processes, against one `nekro up` in another process and on their own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator

import pytest
from forked_process import ForkedCommand
from nekro_shell import NEKRO, Shell, open_shell
from waiting import WAIT_SECONDS, wait_until

from nekro.cli.services.ownership import read_running

PLUGIN = '''
import threading
from typing import Annotated

from nekro_agent.api.plugin import Arg, CmdCtl, CommandExecutionContext, NekroPlugin, SandboxMethodType
from nekro_agent.api.schemas import AgentCtx

plugin = NekroPlugin(
    name="Probe", module_name="probe", description="For tests.", version="1", author="t", url=""
)


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "square")
async def square(_ctx: AgentCtx, number: int) -> int:
    """Square a number."""
    if not isinstance(number, int):
        raise TypeError(f"number must be an int, not {type(number).__name__}")
    return number * number


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "greet")
async def greet(_ctx: AgentCtx, name: str, *, chat: bool = False) -> str:
    """Greet."""
    return f"{_ctx.chat_key}/{_ctx.from_user_id}: こんにちは {name}"


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "unpicklable")
async def unpicklable(_ctx: AgentCtx) -> object:
    """Return what cannot leave the worker."""
    return threading.Lock()


@plugin.mount_sandbox_method(SandboxMethodType.AGENT, "think")
async def think(_ctx: AgentCtx, about: str) -> str:
    """Wake the agent."""
    return f"thought about {about}"


@plugin.mount_command(name="greet", description="Greets", usage="greet <name>")
async def greet_command(context: CommandExecutionContext, name: Annotated[str, Arg("name", positional=True)]):
    """Greet, or ask whom."""
    yield CmdCtl.message("one moment")
    if name == "?":
        yield CmdCtl.wait("whom?", callback_cmd="greet", options=["Ada", "Bob"], timeout=60)
    else:
        yield CmdCtl.success(f"こんにちは {name}", data={"by": context.username})
'''


@pytest.fixture(scope="module")
def shell() -> Iterator[Shell]:
    """Commands with the plugin above beside a broken one, and no other settings."""
    broken = "import nothing_like_this\nplugin = 1\n"
    with open_shell({"probe.py": PLUGIN, "broken.py": broken}) as shell:
        yield shell


LOOPS_AND_THREADS = """
from concurrent.futures import ThreadPoolExecutor

total = 0
for number in range(20):
    total += square(number)
with ThreadPoolExecutor(4) as pool:
    total += sum(pool.map(square, range(20)))
print(total, greet("世界"))
"""


@pytest.mark.usefixtures("up")
def test_exec_runs_calls_in_loops_and_threads(shell: Shell) -> None:
    (shell.directory / "loops.py").write_text(LOOPS_AND_THREADS, "utf-8")
    done = shell("exec", "loops.py", "--chat-key", "group.1", "--user-id", "ada", "--json")
    assert done.code == 0, done.err
    assert sorted(done.value) == ["calls", "exit_code", "follow_ups", "output", "stop_type"]
    assert done.value["stop_type"] == "NORMAL"
    assert done.value["output"].strip() == f"{2 * sum(n * n for n in range(20))} group.1/ada: こんにちは 世界"
    assert len(done.value["calls"]) == 41
    assert {call["method"] for call in done.value["calls"]} == {"t.probe.square", "t.probe.greet"}
    assert done.value["follow_ups"] == []


@pytest.mark.usefixtures("up")
def test_call_prints_the_value_and_its_worker(shell: Shell) -> None:
    done = shell("call", "greet", "--args", '{"name": "猫"}', "--user-id", "ada", "--json")
    assert done.code == 0, done.err
    assert sorted(done.value) == ["duration_ms", "id", "type", "value", "worker"]
    assert (done.value["value"], done.value["type"]) == ("cli/ada: こんにちは 猫", "tool")
    assert done.value["worker"].startswith("methods@")
    plain = shell.inside("call", "t.probe.square", "--args", "[12]")
    assert (plain.code, plain.out) == (0, "144\n")


@pytest.mark.extended
@pytest.mark.usefixtures("up")
def test_a_command_answers_asks_a_question_and_refuses(shell: Shell) -> None:
    done = shell("command", "g1", "/greet 猫", "--user-id", "ada", "--json")
    assert done.code == 0, done.err
    assert done.value == {
        "status": "success",
        "responses": [
            {"status": "processing", "message": "one moment"},
            {"status": "success", "message": "こんにちは 猫", "data": {"by": "ada"}},
        ],
    }
    asked = shell.inside("command", "g1", "/greet ?")
    assert (asked.code, asked.out) == (0, "one moment\nwhom?\n")
    assert "answer within 60 s (Ada, Bob): nekro command g1 'TEXT'" in asked.err
    assert shell.inside("command", "g1", "Bob").out == "one moment\nこんにちは Bob\n"
    for line, words in [("/greet", "name (name) is missing"), ("/great", "did you mean greet")]:
        refused = shell.inside("command", "g1", line)
        assert (refused.code, refused.out) == (6, "") and words in refused.err
    assert "needs the permission user" in shell.inside("command", "g1", "/greet x", "--as", "public").err
    assert "no command waits for an answer" in shell.inside("command", "g1", "Bob").err
    (listed,) = shell.inside("command", "--json").value
    assert (listed["full_name"], listed["permission"]) == ("t.probe:greet", "user")
    assert "/greet" in shell.inside("command").out


@pytest.mark.usefixtures("up")
def test_an_agent_call_ends_the_code_and_is_the_exit_code(shell: Shell) -> None:
    done = shell("exec", "-", "--no-follow-up", "--json", given="think('cats')\nprint('never')\n")
    assert done.code == 8, done.err
    assert (done.value["stop_type"], done.value["exit_code"]) == ("AGENT", 8)
    assert "never" not in done.value["output"]
    assert [call["method"] for call in done.value["calls"]] == ["t.probe.think"]


@pytest.mark.usefixtures("up")
@pytest.mark.parametrize(
    ("arguments", "kind", "words"),
    [
        (["sqare", "--args", "[1]"], "MethodNotFoundError", "did you mean square"),
        (["square", "--args", '["a"]'], "TypeError", "number must be an int, not str"),
        (["square"], "ArgumentError", "number"),
        (["square", "--args", "[1, 2, 3]"], "ArgumentError", ""),
        (["unpicklable"], "ResultError", "lock"),
        (["greet", "--args", "@big.json"], "ArgumentError", "1048576"),
    ],
)
def test_a_failing_call_prints_the_reason(shell: Shell, arguments: list[str], kind: str, words: str) -> None:
    (shell.directory / "big.json").write_text(json.dumps(["x" * (2 << 20)]), "utf-8")
    done = shell.inside("call", *arguments, "--json")
    assert done.code == 6, done.err
    assert done.value["error"]["type"] == kind
    assert words in done.value["error"]["message"]
    assert done.err.splitlines()[-1].startswith("error: ")


FAULTS = """
def fault(name, call, *arguments):
    try:
        call(*arguments)
    except Exception as exc:
        print(f"{name}: {type(exc).__name__}: {exc}")

fault("type", square, "a")
fault("missing", square)
fault("unpicklable", unpicklable)
fault("large", greet, "x" * (2 << 20))
sqare(1)
"""


@pytest.mark.usefixtures("up")
def test_code_may_catch_errors_of_its_calls_and_ends_with_uncaught_ones(shell: Shell) -> None:
    done = shell("exec", "-", given=FAULTS)
    assert done.code == 1, done.err
    said = dict(line.split(": ", 1) for line in done.out.splitlines() if ": " in line)
    assert said["type"].startswith("MethodError: TypeError: number must be an int, not str")
    assert said["missing"].startswith("TypeError: ")
    assert said["unpicklable"].startswith("MethodError: ResultError: ")
    assert "1048576" in said["large"]
    assert "NameError: name 'sqare' is not defined" in done.out


@pytest.mark.usefixtures("up")
def test_code_with_a_syntax_error_ends_with_error(shell: Shell) -> None:
    done = shell("exec", "-", given="print('before')\nx = (\n")
    assert (done.code, "before" in done.out) == (1, False)
    assert "SyntaxError" in done.out
    assert "line 2" in done.out


@pytest.mark.usefixtures("up")
def test_a_second_up_is_refused(shell: Shell) -> None:
    done = shell.inside("up")
    assert done.code == 13
    assert "already runs on" in done.err


def test_a_killed_worker_is_restarted(shell: Shell, up: ForkedCommand) -> None:
    before = read_running(shell.data_dir)
    assert before is not None
    assert before.pid == up.pid
    victim = next(worker for worker in before.workers if worker.lane == "methods")
    os.kill(victim.pid, signal.SIGKILL)

    def replaced() -> bool:
        running = read_running(shell.data_dir)
        return running is not None and any(
            worker.name == victim.name and worker.pid != victim.pid for worker in running.workers
        )

    wait_until(replaced, what="the worker to be replaced")
    assert shell.inside("call", "square", "--args", "[3]").out == "9\n"


def test_ctrl_c_stops_up_gracefully_and_leaves_nothing(shell: Shell, up: ForkedCommand) -> None:
    running = read_running(shell.data_dir)
    assert running is not None
    up.send_signal(signal.SIGINT)
    assert up.wait(WAIT_SECONDS) == 0
    assert read_running(shell.data_dir) is None
    for worker in running.workers:
        with pytest.raises(ProcessLookupError):
            os.kill(worker.pid, 0)
    assert not (shell.data_dir / "run" / "redis.sock").exists()


def test_without_up_a_command_starts_its_own_system(shell: Shell) -> None:
    done = shell("call", "greet", "--args", '["own"]', "--json")
    assert done.code == 0, done.err
    assert done.value["worker"].startswith("methods@")
    assert read_running(shell.data_dir) is None
    assert (shell.data_dir / "logs" / "methods.log").exists()
    assert not (shell.data_dir / "run" / "redis.sock").exists()


def test_a_broken_plugin_is_reported_and_the_rest_works(shell: Shell) -> None:
    done = shell.inside("plugins", "--json")
    assert done.code == 5
    states = {plugin["key"]: plugin for plugin in done.value}
    assert states["t.probe"]["status"] == "ok"
    assert states["broken"]["status"] == "failed"
    assert "nothing_like_this" in states["broken"]["error"]
    named = {"key", "status", "path", "version", "error", "placeholders", "files", "files_reason"}
    assert named == set(states["broken"])
    methods = shell.inside("methods", "--json")
    assert methods.code == 0
    square = next(method for method in methods.value if method["name"] == "square")
    assert square == {
        "name": "square",
        "task": "t.probe.square",
        "plugin": "t.probe",
        "type": "tool",
        "lane": "methods",
        "signature": "(number: int) -> int",
        "doc": "Square a number.",
    }


NOWHERE = "127.0.0.1:1"


@pytest.mark.parametrize(
    ("arguments", "variable", "url", "code"),
    [
        (["call", "square", "--args", "[1]"], "NEKRO_BROKER__URL", f"redis://{NOWHERE}/0", 3),
        (["exec", "code.py"], "NEKRO_BROKER__URL", f"redis://{NOWHERE}/0", 3),
        (["history", "cli"], "NEKRO_DATABASE__URL", f"postgresql://u:s3cret@{NOWHERE}/x", 4),
        (["exec", "code.py"], "NEKRO_DATABASE__URL", f"postgresql://u:s3cret@{NOWHERE}/x", 4),
        (["doctor"], "NEKRO_DATABASE__URL", f"postgresql://u:s3cret@{NOWHERE}/x", 4),
    ],
)
def test_an_unreachable_server_is_named(
    shell: Shell, arguments: list[str], variable: str, url: str, code: int
) -> None:
    (shell.directory / "code.py").write_text("square(2)\n", "utf-8")
    done = shell.inside(*arguments, **{variable: url})
    assert done.code == code, done.err + done.out
    said = done.out + done.err
    assert "127.0.0.1" in said
    assert "s3cret" not in said


def test_an_external_database_is_migrated_on_request(shell: Shell) -> None:
    url = f"sqlite:///{shell.directory / 'own.db'}"
    before = shell.inside("history", "cli", NEKRO_DATABASE__URL=url)
    assert (before.code, "nekro db upgrade" in before.err) == (4, True)
    assert shell("db", "upgrade", NEKRO_DATABASE__URL=url).code == 0
    assert shell.inside("db", "upgrade", NEKRO_DATABASE__URL=url).code == 0
    after = shell.inside("history", "cli", NEKRO_DATABASE__URL=url)
    assert (after.code, "there is no chat 'cli'" in after.err) == (4, True)


def test_rounds_without_a_model_are_refused_at_once(shell: Shell) -> None:
    for arguments in (["send", "cli", "hello"], ["chat"]):
        done = shell.inside(*arguments)
        assert (done.code, "NEKRO_LLM__BASE_URL" in done.err) == (12, True)


@pytest.mark.extended
def test_a_closed_output_pipe_is_no_error(shell: Shell) -> None:
    words = " ".join(NEKRO)
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {words} doctor --settings | head -1"],
        cwd=shell.directory,
        env=shell.environment,
        capture_output=True,
        text=True,
        timeout=WAIT_SECONDS,
    )
    assert "VARIABLE" in done.stdout
    assert done.stderr.replace("\n", "") in (
        "",
        "* differs from its default; set it in the environment or in ./.env",
    )
