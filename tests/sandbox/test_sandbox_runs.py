"""The environment of code in a sandbox, and the results of runs."""

from __future__ import annotations

import ast
import asyncio
import base64
import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import uvloop
from sandbox_lab import Lab, host_processes, lab, method
from waiting import WAIT_SECONDS

from nekro.sandbox.drivers.bwrap import BwrapDriver
from nekro.sandbox.models import Limit, Returned, StopType, StubCall, StubResult
from nekro_agent.errors import SandboxError
from nekro_agent.methods import OWN_NAMES


async def test_code_that_ends_is_normal(box: Lab) -> None:
    result = await box.run("print(1 + 1)")
    assert (result.stop_type, result.exit_code, result.output) == (StopType.NORMAL, 0, "2\n")
    assert (result.limit, result.error, result.calls, result.truncated) == (None, None, 0, False)
    assert result.driver == "bwrap"


@pytest.mark.parametrize(
    ("code", "stop", "exit_code"),
    [
        ("exit()", StopType.NORMAL, 0),
        ("exit(0)", StopType.NORMAL, 0),
        ("raise SystemExit", StopType.NORMAL, 0),
        ("exit(3)", StopType.ERROR, 3),
        ("exit(9)", StopType.MANUAL, 9),
        ("import sys; sys.exit(9)", StopType.MANUAL, 9),
        ("exit('words')", StopType.ERROR, 1),
        ("raise ValueError('x')", StopType.ERROR, 1),
    ],
)
async def test_exit_codes_decide_the_stop_type(box: Lab, code: str, stop: StopType, exit_code: int) -> None:
    result = await box.run(code)
    assert (result.stop_type, result.exit_code) == (stop, exit_code)


async def test_the_runner_imports_no_file_of_the_standard_library(tmp_path: Path) -> None:
    # Each one is found, read and run at every cold start: `datetime` alone took 8 % of it.
    frozen = subprocess.run(
        [sys.executable, "-I", "-S", "-c", "import _imp; print(_imp._frozen_module_names())"],
        capture_output=True,
        text=True,
        check=True,
    )
    code = (
        "import sys; print([m for m, v in sys.modules.items() if getattr(v, '__file__', '').endswith('.py')])"
    )
    async with lab(tmp_path, fork_server=False) as box:
        result = await box.run(code)
    files = set(ast.literal_eval(result.output)) - set(ast.literal_eval(frozen.stdout))
    assert files <= {"__main__", "os.path", "encodings", "encodings.aliases", "encodings.utf_8"}


async def test_a_default_timeout_of_the_services_sockets_does_not_affect_the_guest(
    box: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As kombu sets it temporarily while a worker stops or loses its connection.
    pairs = socket.socketpair

    def with_timeout(*arguments: int) -> tuple[socket.socket, socket.socket]:
        made = pairs(*arguments)
        for end in made:
            end.settimeout(2)
        return made

    monkeypatch.setattr(socket, "socketpair", with_timeout)
    box.handlers["echo"] = lambda *args: args
    result = await box.run("print(echo(1))")
    assert (result.stop_type, result.output) == (StopType.NORMAL, "(1,)\n")


async def test_tool_values_are_returned_by_bare_name_and_by_path(box: Lab) -> None:
    result = await box.run("print(echo(1, y='b')); print(alice.tools.echo(2)); print(_ck)", chat_key="qq:7")
    assert result.output == "((1,), {'y': 'b'})\n((2,), {})\nqq:7\n"
    assert result.calls == 2


async def test_author_module_and_bare_names_share_the_globals(box: Lab) -> None:
    methods = [
        method("echo", path="echo.tools.echo"),
        method("report", path="print.tools.report"),
        method("hidden", name=None, path="bob.more.hidden"),
    ]
    box.handlers["hidden"] = lambda: "found"
    result = await box.run("print(echo.tools.echo(1), bob.more.hidden())\nhidden()", methods=methods)
    assert result.output.startswith("((1,), {}) found\n")
    assert result.error == "NameError: name 'hidden' is not defined"


async def test_own_names_of_the_sandbox_are_those_that_the_host_knows(box: Lab) -> None:
    result = await box.run(
        "print(sorted(set(globals()) - {'__builtins__', '__name__', '__doc__'}))", methods=[]
    )
    names = {name for name in ast.literal_eval(result.output) if not name.startswith("__")}
    assert names == OWN_NAMES


async def test_plugins_with_names_of_the_sandbox_and_of_python_spoil_no_run(box: Lab) -> None:
    methods = [
        method("echo", path="alice.__class__.echo"),
        method("hidden", name="MethodError", path="_ck.tools.hidden"),
        method("report", path="dynamic_importer.tools.report"),
    ]
    result = await box.run("print(_ck, MethodError.__mro__[1], echo(1))", methods=methods, chat_key="qq:7")
    assert result.output == "qq:7 <class 'Exception'> ((1,), {})\n"


async def test_stubs_show_doc_and_signature(box: Lab) -> None:
    stub = method(
        "greet", signature="(name: str, /, *rest: int, times: int = 2, how=Mode.LOUD) -> str", doc="Hi."
    )
    result = await box.run(
        "import inspect; print(greet.__doc__, greet.__name__, inspect.signature(greet)); print(greet)",
        methods=[stub],
    )
    assert result.output == (
        "Hi. greet (name: 'str', /, *rest: 'int', times: 'int' = 2, how=Mode.LOUD) -> 'str'\n"
        "<plugin method alice.tools.greet(name: str, /, *rest: int, times: int = 2, how=Mode.LOUD) -> str>\n"
    )


async def test_signature_that_cannot_be_parsed_has_a_fallback(box: Lab) -> None:
    result = await box.run(
        "import inspect; print(inspect.signature(odd))", methods=[method("odd", signature="(<?>)")]
    )
    assert result.output == "(*args: 'Any', **kwargs: 'Any') -> 'Any'\n"


async def test_method_error_names_type_and_line(box: Lab) -> None:
    result = await box.run("x = 1\nfail()\nprint('never')")
    assert result.stop_type is StopType.ERROR
    assert result.error == "MethodError: ValueError: no good"
    assert 'File "<code>", line 2, in <module>\n    fail()' in result.output
    assert "runner.py" not in result.output
    assert "never" not in result.output


async def test_method_error_can_be_caught_by_name(box: Lab) -> None:
    result = await box.run("try:\n    fail()\nexcept MethodError as exc:\n    print('caught', exc)")
    assert (result.stop_type, result.output) == (StopType.NORMAL, "caught ValueError: no good\n")


async def test_wrong_arguments_are_a_type_error_at_the_calling_line(box: Lab) -> None:
    result = await box.run("misuse()")
    assert result.error == "TypeError: missing argument 'x'"


async def test_unpicklable_argument_is_a_type_error_without_a_call(box: Lab) -> None:
    result = await box.run("echo(lambda: 1)")
    assert result.error is not None
    assert result.error.startswith("TypeError: an argument cannot be sent to a plugin")
    assert box.calls == []


async def test_syntax_error_is_readable(box: Lab) -> None:
    result = await box.run("def f(:\n    pass")
    assert result.output == '  File "<code>", line 1\n    def f(:\n          ^\nSyntaxError: invalid syntax\n'


async def test_chained_errors_show_the_lines_of_the_code(box: Lab) -> None:
    result = await box.run(
        "try:\n    1 / 0\nexcept ZeroDivisionError as exc:\n    raise KeyError('k') from exc"
    )
    assert "ZeroDivisionError: division by zero" in result.output
    assert "The above exception was the direct cause" in result.output
    assert "runner.py" not in result.output


@pytest.mark.parametrize(
    ("name", "stop"), [("agent", StopType.AGENT), ("picture", StopType.MULTIMODAL_AGENT)]
)
async def test_agent_result_ends_the_run_before_the_next_line(box: Lab, name: str, stop: StopType) -> None:
    result = await box.run(f"print('before')\n{name}()\nprint('after')\nreport('after')")
    assert (result.stop_type, result.output) == (stop, "before\n")
    assert box.reports == []


async def test_agent_result_bypasses_ordinary_handlers_and_runs_clean_up(box: Lab) -> None:
    code = """
try:
    with open('shared/kept.txt', 'w') as file:
        file.write('kept')
        agent()
except Exception:
    report('handled')
report('later')
"""
    result = await box.run(code)
    assert result.stop_type is StopType.AGENT
    assert box.reports == []
    assert (box.shared() / "kept.txt").read_text() == "kept"


@pytest.mark.parametrize("chars", [1, 5_000, 30_000])
async def test_output_before_an_agent_result_is_complete(box: Lab, chars: int) -> None:
    code = f"""
import atexit, os
os.write(1, b'a' * {chars})
print('b' * {chars}, end='')
try:
    agent()
finally:
    print('cleaned up')
"""
    for _ in range(5):
        result = await box.run(code)
        assert result.stop_type is StopType.AGENT
        assert result.output == "a" * chars + "b" * chars + "cleaned up\n"


async def test_an_agent_result_arrives_before_the_processes_have_ended(box: Lab) -> None:
    code = """
import os, time
if os.fork() == 0:
    while True:
        os.write(1, b'.')
        time.sleep(0.001)
agent()
"""
    result = await box.run(code)
    assert (result.stop_type, result.exit_code) == (StopType.AGENT, None)
    following = await box.run(
        "import os\nprint(len([name for name in os.listdir('/proc') if name.isdigit()]))"
    )
    assert following.output == "2\n"


async def test_code_that_fakes_its_end_after_an_agent_result_is_killed(box: Lab) -> None:
    code = """
import os
file = open('alive', 'wb', buffering=0)
try:
    agent()
finally:
    os.dup2(os.open('/dev/null', os.O_RDWR), 3)
    while True:
        file.write(b'x')
"""
    assert (await box.run(code)).stop_type is StopType.AGENT
    await box.run("")
    size = (box.shared() / "alive").stat().st_size
    await box.run("")
    assert (box.shared() / "alive").stat().st_size == size


async def test_files_over_the_quota_before_an_agent_result_are_deleted(tmp_path: Path) -> None:
    async with lab(tmp_path, shared_bytes=1 << 20) as box:
        await box.run("open('shared/big', 'wb').write(b'x' * (1 << 20) * 2)\nagent()")
        assert (await box.run("import os\nprint(os.listdir('shared'))")).output == "[]\n"


async def test_closing_after_an_agent_result_leaves_nothing(tmp_path: Path) -> None:
    async with lab(tmp_path) as box:
        await box.run("import os, time\nif not os.fork():\n    time.sleep(60)\nagent()")
    assert os.geteuid() != 0 or host_processes(box.user()) == []


async def test_code_cannot_outlive_an_agent_result(box: Lab) -> None:
    code = """
while True:
    try:
        agent()
    except BaseException:
        try:
            report('outlived')
        except BaseException:
            pass
"""
    result = await box.run(code)
    assert result.stop_type is StopType.AGENT
    assert box.reports == []
    assert [call[0] for call in box.calls] == ["agent"]


async def test_agent_result_in_a_thread_stops_the_main_thread(box: Lab) -> None:
    code = """
import threading, time
threading.Thread(target=agent).start()
time.sleep(60)
report('woke up')
"""
    result = await box.run(code)
    assert result.stop_type is StopType.AGENT
    assert box.reports == []


async def test_methods_can_be_called_from_threads(box: Lab) -> None:
    code = """
from concurrent.futures import ThreadPoolExecutor
with ThreadPoolExecutor(16) as pool:
    values = list(pool.map(lambda i: echo(i)[0][0], range(100)))
print(values == list(range(100)))
"""
    result = await box.run(code)
    assert (result.output, result.calls) == ("True\n", 100)


async def test_non_daemon_threads_are_waited_for(box: Lab) -> None:
    code = """
import atexit, threading, time
def work():
    time.sleep(0.05)
    print('worked')
threading.Thread(target=work).start()
atexit.register(print, 'at exit')
"""
    result = await box.run(code)
    assert (result.stop_type, result.output) == (StopType.NORMAL, "worked\nat exit\n")


async def test_forked_process_cannot_call_methods(box: Lab) -> None:
    code = """
import os
if os.fork() == 0:
    try:
        echo(1)
    except MethodError as exc:
        print(exc)
else:
    os.wait()
    print(echo(2))
"""
    result = await box.run(code)
    assert result.stop_type is StopType.NORMAL
    assert "not from a fork" in result.output
    assert "((2,), {})" in result.output


async def test_open_files_are_flushed_at_the_end(box: Lab) -> None:
    await box.run("file = open('shared/a.txt', 'w')\nfile.write('text')")
    assert (box.shared() / "a.txt").read_text() == "text"


class Unknown:
    """A class that only the worker can import."""

    def __init__(self) -> None:
        self.city = "Paris"


async def test_value_of_a_class_missing_inside_becomes_opaque(box: Lab) -> None:
    box.handlers["get"] = lambda: {"items": [Unknown()]}
    result = await box.run("value = get()['items'][0]\nprint(value.city, type(value).__name__, value)")
    assert result.stop_type is StopType.NORMAL
    assert result.output.startswith("Paris Unknown <")
    assert "city='Paris'" in result.output


async def test_value_that_its_class_refuses_becomes_opaque(box: Lab) -> None:
    # An exception class whose constructor requires more arguments than the pickle has.
    box.handlers["get"] = lambda: Returned(value=pickled(b"\x80\x04cjson\nJSONDecodeError\n(VX\ntR."))
    result = await box.run("value = get()\nprint(value.args)")
    assert result.output == "('X',)\n"


def pickled(data: bytes) -> bytes:
    """A value without a tagged form, as a worker sends it."""
    return json.dumps({"$pickle": ["why", base64.b64encode(data).decode()]}).replace(": ", ":").encode()


@pytest.mark.parametrize("data", [b"garbage", b"\x80\x04N.", b'{"$other":1}', b"[1] 2", pickled(b"garbage")])
async def test_undecodable_value_is_an_error_not_a_crash(box: Lab, data: bytes) -> None:
    box.handlers["get"] = lambda: Returned(value=data)
    result = await box.run("get()")
    assert result.error is not None
    assert result.error.startswith("MethodError: the value cannot be opened here")


async def test_value_over_the_limit_is_an_error(bwrap_driver: BwrapDriver, tmp_path: Path) -> None:
    async with lab(tmp_path, return_bytes=2048) as box:
        box.handlers["get"] = lambda: b"x" * 4096
        result = await box.run("get()")
    assert result.error is not None
    assert "ResultError: alice.tools.get returned" in result.error


async def test_large_value_arrives_whole(box: Lab) -> None:
    box.handlers["get"] = lambda: b"x" * (5 << 20)
    result = await box.run("print(len(get()))")
    assert result.output == f"{5 << 20}\n"


async def test_dispatch_that_fails_unexpectedly_is_an_error_without_its_text(box: Lab) -> None:
    def explode() -> None:
        raise RuntimeError("a secret detail")

    box.handlers["explode"] = explode
    result = await box.run("explode()")
    assert (
        result.error == "MethodError: InternalError: alice.tools.explode could not be called (RuntimeError)"
    )


async def test_shared_is_writable_and_uploads_is_readable(box: Lab) -> None:
    (box.areas.uploads_dir("chat") / "in.txt").write_text("upload")
    result = await box.run(
        "import os\nprint(os.getcwd(), open('uploads/in.txt').read())\n"
        "open('/app/shared/out.txt', 'w').write('x')"
    )
    assert result.output == "/app/shared upload\n"
    assert (box.shared() / "out.txt").read_text() == "x"


async def test_private_files_of_the_host_become_readable_inside(box: Lab) -> None:
    for directory in (box.shared(), box.areas.uploads_dir("chat")):
        (directory / "private.txt").write_text("text")
        (directory / "private.txt").chmod(0o600)
    result = await box.run(
        "print(open('shared/private.txt').read(), open('uploads/private.txt').read())\n"
        "open('shared/private.txt', 'a').write('!')"
    )
    assert (result.stop_type, result.output) == (StopType.NORMAL, "text text\n")


async def test_file_that_a_plugin_writes_during_a_call_can_be_changed_inside(box: Lab) -> None:
    def write() -> None:
        (box.shared() / "made").mkdir()
        (box.shared() / "made" / "by_plugin.txt").write_text("plugin")

    box.handlers["write"] = write
    result = await box.run("write()\nopen('shared/made/by_plugin.txt', 'a').write('+code')")
    assert result.stop_type is StopType.NORMAL, result.output
    assert (box.shared() / "made" / "by_plugin.txt").read_text() == "plugin+code"


async def test_shared_files_survive_to_the_next_run(box: Lab) -> None:
    await box.run("open('shared/state.txt', 'w').write('1')")
    result = await box.run("print(open('shared/state.txt').read())")
    assert result.output == "1\n"


async def test_chats_with_similar_keys_have_their_own_files(box: Lab) -> None:
    await box.run("open('shared/a.txt', 'w')", chat_key="chat-1")
    result = await box.run("import os; print(os.listdir('shared'))", chat_key="chat_1")
    assert result.output == "[]\n"


async def test_packages_of_the_service_are_not_visible(box: Lab) -> None:
    result = await box.run(
        "for name in ('pydantic', 'celery', 'sandbox', 'nekro_agent', 'pip'):\n"
        "    try:\n        __import__(name)\n        print(name)\n    except ImportError:\n        pass"
    )
    assert (result.stop_type, result.output) == (StopType.NORMAL, "")


@pytest.mark.usefixtures("own_packages")
async def test_configured_interpreter_provides_its_packages(tmp_path: Path) -> None:
    async with lab(tmp_path, python=Path(sys.executable)) as box:
        result = await box.run("import pydantic; print(pydantic.__file__)")
    assert result.output.startswith("/opt/site/0/pydantic")


async def test_multiprocessing_works_with_functions_of_the_code(box: Lab) -> None:
    code = """
import multiprocessing
def double(x):
    return 2 * x
with multiprocessing.Pool(2) as pool:
    print(pool.map(double, [1, 2, 3]))
"""
    result = await box.run(code)
    assert result.output == "[2, 4, 6]\n", result.output


async def test_output_is_streamed_while_the_code_runs(box: Lab) -> None:
    pieces: list[str] = []
    seen = threading.Event()

    def on_output(text: str) -> None:
        pieces.append(text)
        seen.set()

    async def wait_for_output() -> bool:
        return await asyncio.to_thread(seen.wait, 10)

    box.handlers["wait"] = wait_for_output
    result = await box.run("print('early')\nprint(wait())", on_output=on_output)
    assert result.output == "early\nTrue\n"
    assert "".join(pieces) == result.output


async def test_failing_output_callback_does_not_end_the_run(box: Lab) -> None:
    def on_output(text: str) -> None:
        raise ValueError(text)

    result = await box.run("for i in range(3000):\n    print(i)", on_output=on_output)
    assert (result.stop_type, result.output[-5:]) == (StopType.NORMAL, "2999\n")


async def test_call_cancelled_by_another_party_is_an_error_at_its_line(box: Lab) -> None:
    async def cancelled() -> None:
        raise asyncio.CancelledError

    box.handlers["cancelled"] = cancelled
    result = await box.run("cancelled()")
    assert result.error == "MethodError: CallCancelledError: the call was cancelled"


async def test_runs_on_uvloop_in_a_thread(bwrap_driver: BwrapDriver, tmp_path: Path) -> None:
    async def run() -> str:
        async with lab(tmp_path, use=bwrap_driver) as box:
            return str((await box.run("print(echo(1))")).output)

    assert await asyncio.to_thread(uvloop.run, run()) == "((1,), {})\n"


async def test_operator_stop_is_manual(box: Lab) -> None:
    started = asyncio.Event()
    box.handlers["started"] = started.set
    running = asyncio.create_task(box.run("started()\nwhile True: pass", run_id="r1"))
    await asyncio.wait_for(started.wait(), WAIT_SECONDS)
    assert box.manager.stop("r1")
    assert (await running).stop_type is StopType.MANUAL
    assert not box.manager.stop("r1")


async def test_closing_the_manager_ends_running_code(bwrap_driver: BwrapDriver, tmp_path: Path) -> None:
    async with lab(tmp_path, use=bwrap_driver) as box:
        started = asyncio.Event()
        box.handlers["started"] = started.set
        running = asyncio.create_task(box.run("started()\nwhile True: pass"))
        await asyncio.wait_for(started.wait(), WAIT_SECONDS)
    assert running.done()
    assert running.result().stop_type is StopType.MANUAL


async def test_cancelled_run_kills_its_sandbox(box: Lab) -> None:
    started = asyncio.Event()
    box.handlers["started"] = started.set
    running = asyncio.create_task(box.run("started()\nwhile True: pass"))
    await asyncio.wait_for(started.wait(), WAIT_SECONDS)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    # One run per container: this one could not start before the other's resources were released.
    assert (await box.run("print('free')")).output == "free\n"


async def test_runs_of_one_container_are_serialised(box: Lab) -> None:
    code = """
import os
fd = os.open('shared/lock', os.O_CREAT | os.O_EXCL)
echo()
os.unlink('shared/lock')
"""
    results = await asyncio.gather(*(box.run(code) for _ in range(4)))
    assert [result.stop_type for result in results] == [StopType.NORMAL] * 4


async def test_oversized_code_is_refused(box: Lab) -> None:
    with pytest.raises(SandboxError, match="more than 1048576 bytes"):
        await box.run("#" * (1 << 20) + "#")


async def test_duplicate_tokens_are_refused(box: Lab) -> None:
    with pytest.raises(SandboxError, match="same token"):
        await box.run("", methods=[method("echo"), method("echo")])


async def test_malformed_code_is_an_error_of_the_code(box: Lab) -> None:
    for code in ("x = '\ud800'", "a\0b", "\ufeffprint(1", "(" * 500):
        result = await box.run(code)
        assert result.stop_type is StopType.ERROR
        assert result.error is not None


async def test_run_may_have_its_own_time_limit(box: Lab) -> None:
    result = await box.run("while True: pass", wall_seconds=0.2)
    assert (result.stop_type, result.limit, result.exit_code) == (StopType.TIMEOUT, Limit.WALL, 137)


async def test_interpreter_sees_no_environment_of_the_service(
    box: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NEKRO_TEST_SECRET", "s3cr3t")
    result = await box.run("import os; print(dict(os.environ))")
    assert "s3cr3t" not in result.output
    assert os.environ["NEKRO_TEST_SECRET"] == "s3cr3t"


async def test_a_call_states_the_line_of_the_code_that_makes_it(box: Lab) -> None:
    lines: list[int | None] = []

    async def dispatch(call: StubCall) -> StubResult:
        lines.append(call.line)
        return await box.dispatch(call)

    code = """
echo(1)
def twice(x):
    echo(x)
    return echo(
        x,
    )
twice(2)
list(map(echo, [3]))
import functools, threading
functools.reduce(lambda a, b: echo(a + b), [1, 2])
thread = threading.Thread(target=echo, args=(4,))  # no line of the code is on its stack
thread.start()
thread.join()
exec(compile("\\n" * 9_999_999 + "echo(5)", "<code>", "exec"))  # no line of it, and too large
"""
    await box.run(code, dispatch=dispatch)
    assert lines == [2, 4, 5, 9, 11, None, None]


async def test_a_forbidden_call_ends_the_run_and_is_not_dispatched(box: Lab) -> None:
    result = await box.run(
        "echo('fine')\necho('secret')\necho('late')", is_forbidden=lambda text: b"secret" in text
    )
    assert (result.stop_type, result.calls) == (StopType.SECURITY, 2)
    assert [args for _, args, _ in box.calls] == [("fine",)]
