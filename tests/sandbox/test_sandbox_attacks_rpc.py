"""Attacks on the bridge: messages that sandboxed code can send (R of the attack list)."""

from __future__ import annotations

import asyncio
import os
import socket
import tracemalloc
from pathlib import Path

import pytest
from loop_clock import LoopClock
from sandbox_lab import Lab, lab, method
from waiting import WAIT_SECONDS

from broker_config.settings import SandboxSettings
from nekro.sandbox.bridge import Bridge
from nekro.sandbox.limits.enforcement import bridge_limits
from nekro.sandbox.limits.guards import Guard
from nekro.sandbox.models import Limit, Raised, RunResult, StopType, StubCall, StubResult
from nekro.sandbox.streams import FrameKind, encode_frame

#: Sends hand-made frames: frame(kind, call_id, payload).
RAW = """
import os, socket, struct, time
# Without the time limit that the channel gives its reads.
socket.socket(fileno=os.dup(3)).setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, bytes(16))
def raw(data):
    while data:
        data = data[os.write(3, data):]
def frame(kind, call_id=1, payload=b"", length=None):
    raw(struct.pack(">IBI", len(payload) + 5 if length is None else length, kind, call_id) + payload)
NOTHING = b"[[],{}]"
GOOD = b'{"code": 0, "error": null, "limit": null}'
HELLO, RUN, CALL, RETURN, RAISE, STOP, EXIT = range(1, 8)
"""
#: A violation ends the sandbox, so this line must not be reached in time.
LINGER = "\ntime.sleep(30)\n"


def is_security(result: RunResult) -> bool:
    return result.stop_type is StopType.SECURITY and result.exit_code == 137


@pytest.mark.parametrize("argument", ["chat_key='other'", "_ctx=1", "ctx={}", "user_id='u'"])
async def test_attack_R1_identity_arguments_are_type_errors(box: Lab, argument: str) -> None:
    def greet(name: str) -> str:
        return f"hello {name}"

    async def dispatch(call: StubCall) -> StubResult:
        try:
            return await box.dispatch(call)
        except TypeError as exc:
            return Raised(error_type="ArgumentError", message=str(exc))

    box.handlers["greet"] = greet
    result = await box.run(f"greet('x', {argument})", dispatch=dispatch)
    assert result.error is not None
    assert result.error.startswith("TypeError:")
    assert "unexpected keyword argument" in result.error


async def test_attack_R2_method_that_was_not_granted_raises_and_is_not_called(box: Lab) -> None:
    code = RAW + "frame(CALL, 1, b'secret_method\\0' + NOTHING)\nprint(os.read(3, 4096)[9:])"
    result = await box.run(code, methods=[method("echo")])
    assert b"MethodNotFoundError" in result.output.encode()
    assert box.calls == []


@pytest.mark.parametrize(
    "name",
    [b"__import__", b"os.system", b"a" * 10_000, "größe".encode(), b"", b"1x", b"a b", b"a-b", b"\xff"],
    ids=["dunder", "dotted", "10kB", "non-ascii", "empty", "digit", "space", "dash", "binary"],
)
async def test_attack_R3_malformed_method_name_is_security(box: Lab, name: bytes) -> None:
    result = await box.run(RAW + f"frame(CALL, 1, {name!r} + b'\\0' + NOTHING)" + LINGER)
    assert is_security(result), result
    assert box.calls == []


@pytest.mark.parametrize("line", [b"", b"0", b"-1", b"01", b"1" * 8, b"1.5", b"1@2", "١".encode(), b" 1"])
async def test_attack_R3_malformed_line_is_security(box: Lab, line: bytes) -> None:
    result = await box.run(RAW + f"frame(CALL, 1, b'echo@' + {line!r} + b'\\0' + NOTHING)" + LINGER)
    assert is_security(result), result
    assert box.calls == []


@pytest.mark.parametrize(
    "readings",
    [b"A", b"t1 ", b"t1~m2", "١".encode(), b"t1\n", b"!,t1", b"t1!", b"!!", b"\xff", b"<b>", b"a" * 65537],
    ids=[
        "upper",
        "space",
        "twice",
        "digit",
        "line",
        "flag-first",
        "flag-last",
        "flags",
        "byte",
        "tag",
        "long",
    ],
)
async def test_attack_R3_malformed_readings_are_security(box: Lab, readings: bytes) -> None:
    result = await box.run(RAW + f"frame(CALL, 1, b'echo~' + {readings!r} + b'\\0' + NOTHING)" + LINGER)
    assert is_security(result), result
    assert box.calls == []


async def test_attack_R3_flood_of_readings_is_security(box: Lab) -> None:
    code = "for n in range(1, 40):\n    frame(CALL, n, b'echo~' + b'a' * 65536 + b'\\0' + NOTHING)"
    result = await box.run(RAW + code + LINGER)
    assert is_security(result), result
    assert len(box.calls) <= 16


@pytest.mark.parametrize("sent", [b"echo", b"echo~", b"echo@7~t1z,m+-:.", b"echo~!", b"echo~" + b"z" * 65536])
async def test_readings_reach_the_dispatch_as_they_were_sent(box: Lab, sent: bytes) -> None:
    seen: list[str] = []

    async def dispatch(call: StubCall) -> StubResult:
        seen.append(call.readings)
        return await box.dispatch(call)

    code = RAW + f"frame(CALL, 1, {sent!r} + b'\\0' + NOTHING)\nos.read(3, 4096)"
    await box.run(code, dispatch=dispatch)
    assert seen == [sent.decode().partition("~")[2]]


async def test_attack_R3_call_without_a_separator_is_security(box: Lab) -> None:
    assert is_security(await box.run(RAW + "frame(CALL, 1, b'echo')" + LINGER))


async def test_attack_R5_arguments_one_byte_over_the_limit_raise(box: Lab) -> None:
    honest = await box.run("echo(b'x' * (1 << 20))")
    assert honest.error is not None
    assert honest.error.startswith("TypeError: the arguments have")
    forged = await box.run(
        RAW + "frame(CALL, 1, b'echo\\0' + b'x' * ((1 << 20) + 1))\nprint(os.read(3, 4096))"
    )
    assert "arguments may have 1048576 bytes" in forged.output
    assert box.calls == []


async def test_attack_R5_frame_over_the_limit_is_security_before_it_is_read(box: Lab) -> None:
    result = await box.run(RAW + "frame(CALL, 1, b'', length=(1 << 20) + (66 << 10))" + LINGER)
    assert is_security(result)
    assert result.error is not None
    assert "its payload may have" in result.error


@pytest.mark.parametrize("length", [0, 4, 2**32 - 1])
async def test_attack_R6_impossible_frame_length_is_security(box: Lab, length: int) -> None:
    assert is_security(await box.run(RAW + f"frame(CALL, 1, b'', length={length})" + LINGER))


@pytest.mark.parametrize("kind", ["RETURN", "RUN", "STOP", "RAISE", "0", "8", "255"])
async def test_attack_R7_frame_kind_of_the_other_direction_is_security(box: Lab, kind: str) -> None:
    assert is_security(await box.run(RAW + f"frame({kind}, 1, b'{{}}')" + LINGER))


async def test_attack_R8_second_hello_is_security(box: Lab) -> None:
    assert is_security(await box.run(RAW + "frame(HELLO, 0, b'{}')" + LINGER))


async def test_attack_R8_call_before_run_is_security() -> None:
    # Code runs after RUN only, so the other end here is a guest that does not wait for it.
    ours, guest = socket.socketpair()
    reader, writer = await asyncio.open_unix_connection(sock=ours)
    guest.sendall(encode_frame(FrameKind.CALL, b"echo\0", call_id=1))
    while not reader._buffer:  # type: ignore[attr-defined]
        await asyncio.sleep(0)

    async def dispatch(call: StubCall) -> StubResult:
        pytest.fail("the call was carried out")

    limits = bridge_limits(SandboxSettings())
    bridge = Bridge(
        reader,
        writer,
        methods={"echo": method("echo")},
        dispatch=dispatch,
        limits=limits,
        unread=Guard("unread"),
    )
    outcome = await bridge.run(b"{}")
    await bridge.close()
    guest.close()
    assert (outcome.stop, outcome.error) == (
        StopType.SECURITY,
        "the sandbox sent a CALL frame before RUN",
    )


async def test_attack_R8_call_after_exit_is_security(box: Lab) -> None:
    code = "frame(EXIT, 0, GOOD)\nframe(CALL, 1, b'echo\\0' + NOTHING)"
    assert is_security(await box.run(RAW + code + LINGER))
    assert box.calls == []


@pytest.mark.parametrize(
    "report", [b"", b"[]", b"{}", b'{"code": "0", "error": null, "limit": null}', b"[" * 60000]
)
async def test_attack_R8_malformed_exit_is_security(box: Lab, report: bytes) -> None:
    sent = f"{report!r}" if len(report) < 100 else "b'[' * 60000"
    assert is_security(await box.run(RAW + f"frame(EXIT, 0, {sent})" + LINGER))


@pytest.mark.parametrize("second", [1, 0])
async def test_attack_R9_call_id_used_twice_or_backwards_is_security(box: Lab, second: int) -> None:
    code = f"frame(CALL, 1, b'echo\\0' + NOTHING)\nframe(CALL, {second}, b'echo\\0' + NOTHING)"
    assert is_security(await box.run(RAW + code + LINGER))
    assert len(box.calls) <= 1


async def test_attack_R10_call_over_the_limit_of_a_run_is_refused(box: Lab) -> None:
    code = (
        "for i in range(200):\n    echo(i)\ntry:\n    echo(200)\nexcept MethodError as exc:\n    print(exc)"
    )
    result = await box.run(code)
    assert "CallLimitError: a run may make 200 calls" in result.output
    assert len(box.calls) == 200


@pytest.mark.parametrize(
    ("token", "arguments"),
    [("secret_method", "NOTHING"), ("echo", "b'x' * ((1 << 20) + 1)")],
    ids=["unknown", "too_large"],
)
async def test_attack_R2_R10_flood_of_refused_calls_ends_the_run(
    box: Lab, token: str, arguments: str
) -> None:
    code = f"""
import threading
def read_on():
    while os.read(3, 1 << 20):
        pass
threading.Thread(target=read_on, daemon=True).start()
payload = b"{token}\\0" + {arguments}
number = 0
while True:
    number += 1
    frame(CALL, number, payload)
"""
    result = await box.run(RAW + code)
    assert (result.stop_type, result.limit) == (StopType.ERROR, Limit.CALLS)
    assert result.error is not None and "201 calls of the run were refused" in result.error
    # At most the calls in transit when the last one was refused.
    assert result.calls <= 201 + box.settings.max_calls_in_flight
    assert box.calls == []


async def test_attack_R10_further_calls_over_the_limit_of_a_run_end_it(tmp_path: Path) -> None:
    async with lab(tmp_path, max_calls=5) as box:
        code = "while True:\n    try:\n        echo()\n    except MethodError:\n        pass"
        result = await box.run(code)
    assert (result.stop_type, result.limit, result.calls) == (StopType.ERROR, Limit.CALLS, 5 + 5 + 1)
    assert len(box.calls) == 5


async def test_attack_R10_open_calls_are_bounded_and_the_rest_waits(box: Lab) -> None:
    running = most = 0
    release = asyncio.Event()

    async def hold() -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        if running == 8:
            # When eight calls have been answered twice, the ninth would have arrived.
            asyncio.get_running_loop().call_later(0.1, release.set)
        await release.wait()
        running -= 1

    box.handlers["hold"] = hold
    code = """
import threading
for _ in range(40):
    threading.Thread(target=hold).start()
"""
    result = await box.run(code)
    assert (result.stop_type, result.calls, most) == (StopType.NORMAL, 40, 8)


@pytest.mark.parametrize(
    ("end", "stop", "exit_code"),
    [
        ("", StopType.NORMAL, 0),
        ("os._exit(3)", StopType.ERROR, 3),
        ("os.kill(os.getpid(), 9)", StopType.ERROR, 137),
    ],
)
async def test_attack_R10_sandbox_that_ends_while_calls_wait_ends_the_run(
    box: Lab, end: str, stop: StopType, exit_code: int
) -> None:
    """A bridge with the maximum of open calls does not read, but must detect the end of the sandbox."""
    begun = 0
    enough = asyncio.Event()

    async def never() -> None:
        nonlocal begun
        begun += 1
        if begun == 8:
            enough.set()
        await asyncio.Event().wait()

    code = f"""
for number in range(1, 13):
    frame(CALL, number, b"never\\0" + NOTHING)
{end}
"""
    box.handlers["never"] = never
    async with asyncio.timeout(WAIT_SECONDS):
        result = await box.run(RAW + code, wall_seconds=600)
    assert (result.stop_type, result.exit_code) == (stop, exit_code)
    assert enough.is_set() and box.cancelled == ["never"] * 8


async def test_attack_R11_incomplete_frame_ends_in_a_timeout(box: Lab) -> None:
    result = await box.run(RAW + "raw(b'\\0\\0\\0\\x20\\x03')" + LINGER, wall_seconds=0.3)
    assert (result.stop_type, result.limit) == (StopType.TIMEOUT, Limit.WALL)


async def test_attack_R12_unread_answers_end_the_run_with_constant_memory(tmp_path: Path) -> None:
    size = 4 << 20
    async with lab(tmp_path, wall_seconds=0.6) as box:
        value = b"x" * size
        box.handlers["get"] = lambda: value
        code = "for i in range(1, 101):\n    frame(CALL, i, b'get\\0' + NOTHING)"
        tracemalloc.start()
        result = await box.run(RAW + code + LINGER, wall_seconds=60)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert (result.stop_type, result.limit) == (StopType.ERROR, Limit.UNREAD)
    # At most the eight open calls have an answer, once written and once framed.
    assert peak < 20 * size
    assert len(box.calls) <= 16


async def test_attack_R13_passed_descriptors_do_not_arrive(box: Lab) -> None:
    before = len(os.listdir("/proc/self/fd"))
    counts = []
    box.handlers["count"] = lambda: counts.append(len(os.listdir("/proc/self/fd")))
    code = """
import array, socket
channel = socket.socket(fileno=os.dup(3))
call = struct.pack(">IBI", 5 + 6 + len(NOTHING), CALL, 1) + b"count\\0" + NOTHING
for i in range(50):
    try:
        channel.sendmsg([call[:1]], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0] * 20))])
        call = call[1:] + b""
    except OSError:
        break
    if not call:
        break
raw(call)
channel.recv(1)  # the answer has come, or the host has ended the sandbox
"""
    result = await box.run(RAW + code)
    # Where the host is slow to read them, the disk guard takes each for a file of the largest size.
    is_stopped = result.limit is Limit.DISK
    assert is_stopped or result.stop_type in (StopType.NORMAL, StopType.SECURITY), result
    assert is_stopped or counts
    # Descriptors of one running sandbox on the host: socket, pipe, pidfd, directory lock, and a few more.
    assert all(count - before < 20 for count in counts)


async def test_attack_R14_forged_good_exit_before_a_crash_is_an_error(box: Lab) -> None:
    code = 'frame(EXIT, 0, b\'{"code": 0, "error": null, "limit": null}\')\nos.abort()'
    result = await box.run(RAW + code)
    assert (result.stop_type, result.exit_code) == (StopType.ERROR, 128 + 6)


async def test_attack_R15_calls_of_a_killed_run_are_cancelled_and_their_answers_dropped(box: Lab) -> None:
    clock = LoopClock()

    async def never() -> None:
        await clock.forward(WAIT_SECONDS)
        await asyncio.Event().wait()

    box.handlers["never"] = never
    methods = [method("never", timeout_seconds=2 * WAIT_SECONDS)]
    result = await box.run("never()", methods=methods, wall_seconds=WAIT_SECONDS)
    assert result.stop_type is StopType.TIMEOUT
    assert box.cancelled == ["never"]


async def test_attack_R15_calls_concurrent_with_an_agent_result_are_cancelled(box: Lab) -> None:
    waiting = asyncio.Event()

    async def never() -> None:
        waiting.set()
        await asyncio.Event().wait()

    async def agent_later() -> StubResult:
        await waiting.wait()
        return box.handlers["agent"]()  # type: ignore[no-any-return]

    box.handlers |= {"never": never, "later": agent_later}
    result = await box.run("import threading\nthreading.Thread(target=never).start()\nlater()")
    assert result.stop_type is StopType.AGENT
    assert box.cancelled == ["never"]


async def test_attack_R16_concurrent_runs_see_only_their_own_chat(box: Lab) -> None:
    async def one(chat: str) -> None:
        seen = []

        async def dispatch(call: StubCall) -> StubResult:
            seen.append(chat)
            return await box.dispatch(call)

        code = f"for i in range(150):\n    assert echo({chat!r}, i) == (({chat!r}, i), {{}})\nprint(_ck)"
        result = await box.run(code, chat_key=chat, dispatch=dispatch)
        assert (result.stop_type, result.output) == (StopType.NORMAL, f"{chat}\n")
        assert seen == [chat] * 150

    await asyncio.gather(*(one(f"chat{number}") for number in range(4)))
    assert len(box.calls) == 600


async def test_slow_method_is_a_timeout_error_inside_and_is_cancelled(tmp_path: Path) -> None:
    async with lab(tmp_path) as box:

        async def never() -> None:
            await asyncio.Event().wait()

        box.handlers["never"] = never
        code = "try:\n    never()\nexcept TimeoutError as exc:\n    print(type(exc).__name__, exc)"
        result = await box.run(code, methods=[method("never", timeout_seconds=0.2)])
    assert (
        result.output
        == "MethodTimeoutError CallTimeoutError: alice.tools.never did not answer within 0.2 s\n"
    )
    assert box.cancelled == ["never"]
