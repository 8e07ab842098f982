"""Reading of answers in a sandbox: callers take turns, and no answer is lost."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest
from sandbox_lab import Lab, lab

from nekro.sandbox.models import StopType

#: The alarm of the code raises an error.
ALARM = """
import signal
def ring(*_):
    raise TimeoutError
signal.signal(signal.SIGALRM, ring)
"""


def later(box: Lab) -> None:
    """Provide ``later(seconds, value)``, answered after that many seconds."""

    async def answer(seconds: float, value: Any) -> Any:
        await asyncio.sleep(seconds)
        return value

    box.handlers["later"] = answer


async def test_answers_in_any_order_reach_the_threads_that_wait_for_them(box: Lab) -> None:
    later(box)
    result = await box.run(
        """
import threading
wrong = []
def caller(number):
    for turn in range(9):
        # Some come at once, some late, some are larger than one read of the socket.
        value = [number, turn, "x" * (200_000 if (number + turn) % 7 == 0 else 10)]
        answer = later((number * turn) % 3 / 50, value)
        if answer != value:
            wrong.append((number, turn))
threads = [threading.Thread(target=caller, args=(number,)) for number in range(8)]
for thread in threads:
    thread.start()
for turn in range(20):
    if echo(turn)[0] != (turn,):
        wrong.append(("main", turn))
for thread in threads:
    thread.join()
print(wrong)
"""
    )
    assert (result.stop_type, result.output) == (StopType.NORMAL, "[]\n")
    assert result.calls == 8 * 9 + 20


async def test_a_call_interrupted_by_an_alarm_loses_no_other_answer(box: Lab) -> None:
    later(box)
    first_over, all_over = asyncio.Event(), asyncio.Event()

    async def cut(turn: int) -> None:
        """Answered after the alarm: when the next call has arrived, or at the end."""
        await (first_over if turn == 0 else all_over).wait()

    async def following(turn: int) -> str:
        if turn == 0:
            first_over.set()
        if turn == 4:
            all_over.set()
        return "next"

    async def beside() -> str:
        await all_over.wait()
        return "thread"

    box.handlers |= {"cut": cut, "following": following, "beside": beside}
    result = await box.run(
        """
import signal, threading
class Late(Exception):
    pass
def ring(*_):
    raise Late
signal.signal(signal.SIGALRM, ring)
seen = []
thread = threading.Thread(target=lambda: seen.append(beside()))
for turn in range(5):
    if turn == 2:
        thread.start()
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        cut(turn)
    except Late:
        seen.append(turn)
    seen.append(following(turn))
thread.join()
print(sorted(map(str, seen)))
"""
    )
    expected = sorted([*map(str, range(5)), *["next"] * 5, "thread"])
    assert (result.stop_type, result.output) == (StopType.NORMAL, f"{expected}\n"), result.error


async def test_a_signals_handler_may_call_while_the_main_thread_waits(box: Lab) -> None:
    later(box)
    is_over = asyncio.Event()

    async def reader() -> str:
        await is_over.wait()
        return "reader"

    async def over() -> None:
        is_over.set()

    box.handlers |= {"reader": reader, "over": over}
    result = await box.run(
        """
import signal, threading
seen = []
def ring(*_):
    seen.append(later(0.3, "inner"))
signal.signal(signal.SIGALRM, ring)
# The outer answer comes while the inner call waits.
signal.setitimer(signal.ITIMER_REAL, 0.1)
seen.append(later(0.2, "outer"))
# The main thread waits for another one to read.
thread = threading.Thread(target=lambda: seen.append(reader()))
thread.start()
later(0.0, None)
signal.setitimer(signal.ITIMER_REAL, 0.1)
seen.append(later(0.5, "second outer"))
over()
thread.join()
print(seen)
"""
    )
    expected = ["inner", "outer", "inner", "second outer", "reader"]
    assert (result.stop_type, result.output) == (StopType.NORMAL, f"{expected}\n")


@pytest.mark.parametrize("others", [0, 2], ids=["read by the main thread", "read by another thread"])
async def test_a_stop_ends_the_wait_of_the_main_thread(box: Lab, others: int) -> None:
    later(box)
    result = await box.run(
        f"""
import threading
# The first of them reads, for all; without them the main thread does.
for number in range({others}):
    threading.Thread(target=later, args=(60, number)).start()
try:
    threading.Timer(0.3, agent).start()
    later(60, "main")
finally:
    print("left", flush=True)
print("went on")
"""
    )
    assert result.stop_type is StopType.AGENT
    assert "left" in result.output and "went on" not in result.output


#: Twelve open calls are more than the bridge accepts, so that the main thread's write blocks.
THREADS_THAT_WAIT = """
import threading
threads = [threading.Thread(target=later, args=(0.3, large)) for _ in range(12)]
for thread in threads:
    thread.start()
"""
#: Python does not count it; signals that the main thread blocks are delivered to it.
THREAD_OF_A_LIBRARY = """
import ctypes
libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
libc.pthread_mutex_lock(mutex)
libc.pthread_create(ctypes.byref(ctypes.c_ulong()), None, libc.pthread_mutex_lock, mutex)
"""
STARTS_A_THREAD = """
import threading
def prepare():
    threads.append(threading.Thread(target=later, args=(0.01, 1)))
    threads[-1].start()
"""


@pytest.mark.parametrize(
    "others",
    [
        pytest.param("", id="alone"),
        pytest.param(THREADS_THAT_WAIT, id="beside threads that wait"),
        pytest.param(THREAD_OF_A_LIBRARY, id="beside a thread of a library"),
        pytest.param(THREAD_OF_A_LIBRARY + STARTS_A_THREAD, id="after it started a thread"),
    ],
)
async def test_a_signal_handler_may_call_while_its_thread_sends_a_call(box: Lab, others: str) -> None:
    later(box)
    result = await box.run(
        f"""
import signal
large = "x" * 900_000
threads = []
def prepare():
    pass
{others}
rung = []
def ring(*_):
    prepare()
    rung.append(echo(len(rung))[0][0])
    if len(rung) < 20:
        signal.setitimer(signal.ITIMER_REAL, 0.002)
signal.signal(signal.SIGALRM, ring)
signal.setitimer(signal.ITIMER_REAL, 0.002)
while len(rung) < 20:
    assert echo(large)[0][0] == large
for thread in threads:
    thread.join()
print(rung == list(range(20)))
""",
        wall_seconds=20,
    )
    assert (result.stop_type, result.output) == (StopType.NORMAL, "True\n"), result


async def test_a_handlers_call_that_was_sent_before_the_outer_one_becomes_the_reader(box: Lab) -> None:
    later(box)
    result = await box.run(
        """
import signal, threading, time
channel, seen = later._call.__self__, []
send = channel._send_call
def slow(waiter, token, arguments):
    if b"outer" in arguments:
        time.sleep(0.2)
    send(waiter, token, arguments)
channel._send_call = slow
thread = threading.Thread(target=later, args=(0.6, 0))  # it reads first
thread.start()
time.sleep(0.1)
signal.signal(signal.SIGALRM, lambda *_: seen.append(later(0.8, "inner")))
signal.setitimer(signal.ITIMER_REAL, 0.1)
seen.append(later(1, "outer"))
thread.join()
print(seen)
""",
        wall_seconds=30,
    )
    assert (result.stop_type, result.output) == (StopType.NORMAL, "['inner', 'outer']\n")


async def test_a_handler_may_call_while_its_thread_reads_and_no_further_call_is_accepted(box: Lab) -> None:
    later(box)
    result = await box.run(
        """
import signal, threading, time
large, seen = "x" * 900_000, []
def others():
    for thread in threads:
        thread.start()
    signal.setitimer(signal.ITIMER_REAL, 0.5)
threads = [threading.Thread(target=later, args=(1, large)) for _ in range(12)]
signal.signal(signal.SIGALRM, lambda *_: seen.append(len(echo(large)[0][0])))
threading.Timer(0.2, others).start()
seen.append(later(3, "outer"))
for thread in threads:
    thread.join()
print(seen)
""",
        wall_seconds=30,
    )
    assert (result.stop_type, result.output) == (StopType.NORMAL, "[900000, 'outer']\n")


async def test_a_call_is_sent_while_answers_of_interrupted_calls_fill_the_socket(box: Lab) -> None:
    later(box)
    result = await box.run(
        ALARM
        + """
large = "x" * 900_000
for _ in range(12):
    signal.setitimer(signal.ITIMER_REAL, 0.02)
    try:
        later(1, large)
    except TimeoutError:
        pass
print(len(echo(large)[0][0]))
""",
        wall_seconds=30,
    )
    assert (result.stop_type, result.output) == (StopType.NORMAL, "900000\n")


@pytest.mark.parametrize("error", ["TimeoutError", "BlockingIOError", "OSError", "ValueError"])
async def test_what_an_alarm_raises_reaches_the_code_that_waits(box: Lab, error: str) -> None:
    later(box)
    result = await box.run(
        f"""
import signal
def ring(*_):
    raise {error}("too long")
signal.signal(signal.SIGALRM, ring)
signal.setitimer(signal.ITIMER_REAL, 0.1)
try:
    later(60, "an answer")
except {error} as exc:
    print(exc, later(0, "goes on"))
"""
    )
    assert (result.stop_type, result.output) == (StopType.NORMAL, "too long goes on\n")


@pytest.mark.parametrize(("function", "seconds"), [("go_on", 0.8), ("_pass_on", 0.2)])
async def test_a_thread_gets_its_answer_when_a_handler_raises_in_the_one_that_reads(
    box: Lab, function: str, seconds: float
) -> None:
    later(box)
    result = await box.run(
        f"""{ALARM}
import sys, threading
def trace(frame, event, _):
    if event == "call" and frame.f_code.co_name == {function!r}:
        sys.settrace(None)
        signal.raise_signal(signal.SIGALRM)
answers = []
def other():
    answers.append(later(0.4, "other"))
thread = threading.Thread(target=other)
threading.Timer(0.1, thread.start).start()
sys.settrace(trace)
try:
    later({seconds}, "main")
except TimeoutError:
    answers.append("alarm")
thread.join()
print(sorted(answers), later(0, "goes on"))
""",
        wall_seconds=30,
    )
    assert (result.stop_type, result.output) == (StopType.NORMAL, "['alarm', 'other'] goes on\n")


async def test_what_a_handler_raises_at_the_end_of_sending_changes_nothing_for_later_calls(box: Lab) -> None:
    later(box)
    result = await box.run(
        ALARM
        + """
channel = later._call.__self__
send = channel.send
def send_and_ring(*frame):
    signal.raise_signal(signal.SIGALRM)  # blocked until the frame is written
    send(*frame)
channel.send = send_and_ring
try:
    later(0, 1)
except TimeoutError:
    print("alarm", signal.pthread_sigmask(signal.SIG_BLOCK, ()), channel._main_thread_sends)
channel.send = send
print(later(0, "goes on"))
"""
    )
    assert (result.stop_type, result.output) == (StopType.NORMAL, "alarm set() False\ngoes on\n")


async def test_what_an_alarm_raises_while_a_value_is_opened_is_no_error_of_the_method(box: Lab) -> None:
    result = await box.run(
        ALARM
        + """
is_opened = echo.__class__.__call__.__globals__["open_value"]
def opens_and_rings(payload):
    signal.raise_signal(signal.SIGALRM)
    return is_opened(payload)
echo.__class__.__call__.__globals__["open_value"] = opens_and_rings
try:
    echo(1)
except TimeoutError:
    print("alarm")
"""
    )
    assert (result.stop_type, result.output) == (StopType.NORMAL, "alarm\n")


@pytest.mark.parametrize("answer", ["size", "later"])
async def test_code_ends_normally_while_calls_of_its_own_are_still_being_sent(box: Lab, answer: str) -> None:
    async def size(_: float, value: str) -> int:
        await asyncio.sleep(1)
        return len(value)

    later(box)
    box.handlers["size"] = size
    result = await box.run(
        f"""{ALARM}
large = "x" * 900_000
for _ in range(14):
    signal.setitimer(signal.ITIMER_REAL, 0.1)
    try:
        {answer}(1, large)
    except TimeoutError:
        pass
print("end of code")
""",
        wall_seconds=60,
    )
    assert (result.stop_type, result.output, result.error) == (StopType.NORMAL, "end of code\n", None)


async def test_an_answer_to_ended_code_does_not_hide_its_result(box: Lab) -> None:
    is_waiting, is_over = asyncio.Event(), asyncio.Event()

    async def unanswered() -> str:
        is_waiting.set()
        await is_over.wait()
        return "late"

    def hold_the_loop() -> None:
        time.sleep(0.5)  # the code ends meanwhile; the late answer is written before anything is read
        is_over.set()

    async def last() -> None:
        await is_waiting.wait()
        asyncio.get_running_loop().call_soon(hold_the_loop)

    box.handlers |= {"unanswered": unanswered, "last": last}
    result = await box.run(
        """
import threading
threading.Thread(target=unanswered, daemon=True).start()
last()
"""
    )
    assert (result.stop_type, result.exit_code, result.error) == (StopType.NORMAL, 0, None)


#: ``at(n, act)`` runs ``act`` once: before the n-th line that a call executes in the channel's code.
AT_A_LINE = """
import sys
file = echo.__call__.__func__.__code__.co_filename
lines = 0
def at(chosen, act):
    global lines
    lines = 0
    def trace(frame, event, _):
        global lines
        if frame.f_code.co_filename != file or frame.f_code.co_name in ignored:
            return None
        if event == "line":
            lines += 1
            if lines == chosen:
                act()
        return trace
    sys.settrace(trace)
def call(argument):
    try:
        return echo(argument)[0][0]
    finally:
        sys.settrace(None)
ignored = {"go_on"}
"""


@pytest.mark.extended
@pytest.mark.parametrize("size", [1, 300_000])
async def test_a_call_may_be_made_before_any_step_of_a_call(tmp_path: Path, size: int) -> None:
    """As by a finaliser or a signal's handler, which run between two steps of the interpreter."""
    code = f"""
large = "x" * {size}
inside = []
def act():
    inside.append(echo("inside")[0][0])
chosen = 0
while True:
    chosen += 1
    at(chosen, act)
    assert call(large) == large, chosen
    assert echo(chosen)[0][0] == chosen
    if lines < chosen:
        break
print(chosen > 60, inside == ["inside"] * (chosen - 1))
"""
    async with lab(tmp_path, max_calls=1000) as box:
        result = await box.run(AT_A_LINE + code, wall_seconds=60)
    assert (result.stop_type, result.output) == (StopType.NORMAL, "True True\n"), result
