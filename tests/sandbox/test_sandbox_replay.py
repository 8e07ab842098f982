"""The same program again: with the readings and the seed of an earlier attempt it sees the same."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Any

import pytest
from sandbox_lab import Lab, lab

from nekro.sandbox.models import NOT_RESUMABLE, RunResult, StopType, StubCall, StubResult

SEED = secrets.token_hex(32)

#: Each line prints what a program could see differently in another attempt; the calls carry the readings.
READS = {
    "clocks": """
import time
print(time.time(), time.time_ns(), time.monotonic(), time.monotonic_ns(), time.perf_counter())
print(time.process_time(), time.thread_time_ns(), time.clock_gettime(time.CLOCK_REALTIME))
print(time.localtime(), time.gmtime(), time.ctime(), time.asctime(), time.strftime("%c"))
""",
    "datetime": """
import datetime, warnings
from datetime import datetime as moment
warnings.simplefilter("ignore")
class Own(datetime.datetime): pass
print(moment.now(), moment.utcnow(), moment.today(), datetime.date.today(), moment.now(datetime.UTC))
print(repr(Own.now()), repr(Own.today()), type(Own.utcnow()).__name__)
""",
    "random": """
import random, secrets, os, uuid, tempfile
print(random.random(), random.Random().random(), random.SystemRandom().random(), secrets.token_hex())
print(os.urandom(3), os.getrandom(3), uuid.uuid1(), uuid.uuid4(), tempfile.mktemp())
random.seed()
print(random.random())
""",
    "forks": """
import random, os, sys
for _ in range(2):
    if os.fork() == 0:
        print(random.random(), os.urandom(4), flush=True)
        os._exit(0)
    os.wait()
print(random.random())
""",
    "threads": """
import queue, threading, time
answers = queue.Queue()
def work(number):
    answers.put(time.monotonic_ns())
for number in range(20):
    one = threading.Thread(target=work, args=(number,))
    one.start()
    one.join()
print([answers.get(timeout=5) for _ in range(20)])
""",
    "sets": "print({str(number) for number in range(100)}, hash('x'))",
    "listings": """
import glob, os, pathlib
for name in ("z", "b", "k", "a", ".c"):
    open(name, "w").close()
print(os.listdir(), os.listdir(b"."), [entry.name for entry in os.scandir()], list(os.walk(".")))
print(glob.glob("*"), list(pathlib.Path().iterdir()), os.getpid())
""",
}


class Attempts:
    """Runs one program several times, as the host does."""

    def __init__(self, box: Lab) -> None:
        self.box = box
        self.readings: list[str] = []

    async def run(self, code: str, *, chat_key: str, **changes: Any) -> RunResult:
        async def dispatch(call: StubCall) -> StubResult:
            if call.readings:
                self.readings.append(call.readings)
            return await self.box.dispatch(call)

        return await self.box.run(
            code,
            chat_key=chat_key,
            **{"seed": SEED, "readings": ",".join(self.readings), "dispatch": dispatch, **changes},
        )


async def _outputs(box: Lab, code: str) -> list[str]:
    """Run a program three times, each time with the readings of the attempts before."""
    attempts = Attempts(box)
    outputs = []
    for number in range(3):
        result = await attempts.run(f"{code}\necho()", chat_key=f"attempt-{number}")
        assert result.stop_type is StopType.NORMAL, result
        outputs.append(result.output)
    return outputs


@pytest.mark.parametrize("what", READS)
async def test_program_reads_the_same_again(box: Lab, what: str) -> None:
    outputs = await _outputs(box, READS[what])
    assert outputs[0] == outputs[1] == outputs[2]


@pytest.mark.parametrize("what", ["clocks", "datetime", "random", "sets", "listings"])
async def test_cold_start_reads_the_same_as_a_forked_one(box: Lab, tmp_path: Path, what: str) -> None:
    attempts = Attempts(box)
    code = f"import random, datetime, tempfile, uuid\n{READS[what]}\necho()"
    forked = await attempts.run(code, chat_key="forked")
    async with lab(tmp_path / "cold", fork_server=False) as cold:
        attempts.box = cold
        again = await attempts.run(code, chat_key="cold")
    assert again.output == forked.output


async def test_replaced_functions_are_pickled_and_copied_by_name(box: Lab) -> None:
    code = """
import copy, multiprocessing, os, pickle, sqlite3, time
for function in (time.time, time.localtime, time.perf_counter_ns, time.strftime, time.clock_gettime,
                 os.urandom, os.getrandom, os.listdir, os.scandir, os.open, sqlite3.connect):
    assert pickle.loads(pickle.dumps(function)) is function
    assert copy.deepcopy([function]) == [copy.copy(function)] == [function]
open("one", "w").close()
with multiprocessing.Pool(1) as pool:
    print(pool.map(os.listdir, ["."]))
"""
    assert (await box.run(code, program_id="run")).output == "[['one']]\n"


async def test_other_runs_get_other_random_numbers(box: Lab) -> None:
    outputs = [
        (await box.run(READS["random"], chat_key=f"chat-{number}", seed=secrets.token_hex(32))).output
        for number in range(2)
    ]
    assert not set(outputs[0].split()) & set(outputs[1].split())


async def test_streams_do_not_repeat_within_a_program(box: Lab) -> None:
    code = """
import os, random, secrets, uuid
drawn = [os.urandom(16) for _ in range(500)] + [secrets.token_bytes(16) for _ in range(500)]
drawn += [uuid.uuid4().bytes for _ in range(500)] + [random.Random().randbytes(16) for _ in range(500)]
print(len(set(drawn)), len(os.urandom(1 << 20)), os.urandom(0))
"""
    assert (await box.run(code)).output == "2000 1048576 b''\n"


async def test_clocks_go_on_after_the_readings_and_never_backwards(box: Lab) -> None:
    """Also on a host that started later than that of the first attempt."""
    code = """
import time
first = time.time_ns(), time.monotonic_ns()
echo()
times = [time.time_ns() for _ in range(100)]
since = [time.monotonic_ns() for _ in range(100)]
print(first[0], first[1], min(times) >= first[0], times == sorted(times), since == sorted(since))
print(0 <= since[-1] - first[1] < 60 * 10**9, abs(time.time() - times[0] / 1e9) < 60)
"""
    for monotonic in (10**18, 5):
        result = await box.run(code, readings=f"t{_base36(10**18)},m{_base36(monotonic)}")
        assert result.output == f"{10**18} {monotonic} True True True\nTrue True\n"


async def test_replay_that_is_killed_again_continues_the_readings(box: Lab) -> None:
    code = "import time\nfor _ in range(6):\n    print(time.time_ns())\n    echo()\n    MORE"
    attempts = Attempts(box)
    await attempts.run(code.replace("MORE", "if _ == 1: raise SystemExit"), chat_key="a")
    assert len(attempts.readings) == 2
    second = await attempts.run(code.replace("MORE", "if _ == 3: raise SystemExit"), chat_key="b")
    assert len(attempts.readings) == 4
    third = await attempts.run(code.replace("MORE", ""), chat_key="c")
    assert third.output.startswith(second.output)
    assert len(attempts.readings) == 6


async def test_busy_loop_on_a_clock_is_not_resumable_and_goes_on(box: Lab) -> None:
    attempts = Attempts(box)
    code = "import time\nfor _ in range(30_000): time.monotonic()\necho()\necho()\nprint(1)"
    result = await attempts.run(code, chat_key="a")
    assert result.output == "1\n"
    assert attempts.readings == [NOT_RESUMABLE] * 2


async def test_many_readings_in_all_are_not_resumable(box: Lab) -> None:
    attempts = Attempts(box)
    reads = "[time.monotonic_ns() for _ in range(8000)]"
    code = f"import time\nfor _ in range(60):\n    {reads}\n    echo()\nprint(1)"
    result = await attempts.run(code, chat_key="a", readings="")
    assert result.output == "1\n"
    assert attempts.readings[-1] == NOT_RESUMABLE
    assert sum(map(len, attempts.readings)) <= (1 << 20) + 60


@pytest.mark.parametrize(
    "readings",
    [
        "t",
        "t-",
        "z1,z2",
        "t" + "z" * 60_000,
        ",,,,",
        "t1,m.:+",
        "m-zzzzzzzzzzzz",
        "+",
        "t1" + ",m1" * 100_000,
    ],
    ids=["no number", "sign", "unknown", "huge", "commas", "other", "negative", "plus", "many"],
)
async def test_forged_readings_only_change_what_the_program_reads(box: Lab, readings: str) -> None:
    result = await box.run("import time\nprint(1)\ntime.time_ns(), time.monotonic_ns()", readings=readings)
    assert result.output.startswith("1\n")
    assert result.stop_type in (StopType.NORMAL, StopType.ERROR)


async def test_clock_of_a_class_stays_a_function(box: Lab) -> None:
    code = "import time\nclass Timer:\n    clock = time.time\nprint(Timer().clock() > 0, time.time.__name__)"
    assert (await box.run(code)).output == "True time\n"


def _base36(number: int) -> str:
    digits = ""
    while number:
        number, digit = divmod(number, 36)
        digits = "0123456789abcdefghijklmnopqrstuvwxyz"[digit] + digits
    return digits or "0"
