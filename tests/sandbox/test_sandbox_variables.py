"""Variables that a program leaves for the next one, also of hostile code."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from sandbox_lab import Lab, lab, method
from test_sandbox_attacks_rpc import RAW

from nekro.sandbox.models import KeptVariables, Limit, Raised, RunResult, StopType
from nekro.sandbox.variables import MOST_VARIABLES, is_variable, read_kept, reserved_names
from nekro_agent.methods import OWN_NAMES

KEEP = "KEEP = 8\n"
MOST = 64 << 10


async def left_by(box: Lab, code: str, **changes: Any) -> RunResult:
    return await box.run(code, **({"keep_bytes": MOST} | changes))


async def kept_by(box: Lab, code: str, **changes: Any) -> KeptVariables:
    result = await left_by(box, code, **changes)
    assert result.kept is not None, result
    return result.kept


PLAIN = """
import datetime, decimal, fractions, pathlib, uuid, collections
number, real, text, raw, nothing, truth = 1, float("inf"), "é\\n$x", b"\\x00\\xff", None, True
rows = [{"a": (1, 2), "$b": {3, 4}}, {5: frozenset({6})}]
when = datetime.datetime(2026, 5, 4, 12, tzinfo=datetime.timezone.utc)
price, part = decimal.Decimal("1.50"), fractions.Fraction(1, 3)
path, key = pathlib.Path("/app/shared/x"), uuid.UUID(int=7)
ordered = collections.OrderedDict(b=1, a=2)
"""
SHOWS = """
def show():
    return repr([number, real, text, raw, nothing, truth, rows, when, price, part, path, key, ordered])
"""


async def test_plain_variables_begin_the_next_program_as_they_were(box: Lab) -> None:
    first = await left_by(box, PLAIN + SHOWS + "print(show())")
    assert first.kept is not None
    assert first.kept.not_kept == ("show",)
    code = "import datetime, uuid, collections\n" + SHOWS + "print(show())"
    second = await left_by(box, code, variables=first.kept.values)
    assert second.stop_type is StopType.NORMAL, second
    assert second.output == first.output
    assert second.kept is not None and second.kept.values == first.kept.values


@pytest.mark.parametrize(
    ("end", "stop"),
    [
        ("", StopType.NORMAL),
        ("exit(9)", StopType.MANUAL),
        ("1 / 0", StopType.ERROR),
        ("agent()", StopType.AGENT),
        ("picture()", StopType.MULTIMODAL_AGENT),
        ("import threading; threading.Thread(target=agent).start()\nwhile True: pass", StopType.AGENT),
        ("def f():\n    try:\n        agent()\n    finally:\n        global y; y = 2\nf()", StopType.AGENT),
    ],
)
async def test_variables_are_kept_however_the_program_ends(box: Lab, end: str, stop: StopType) -> None:
    result = await left_by(box, f"x = [1]\n{end}\nx = 'not reached'" if end else "x = [1]")
    assert result.stop_type is stop
    assert result.kept is not None and result.kept.values["x"] == "[1]"
    assert ("y" in result.kept.values) == ("global y" in end)


async def test_imports_stubs_and_underscores_are_neither_kept_nor_named(box: Lab) -> None:
    kept = await kept_by(box, "import os, json as j\nfrom os.path import join\n_x = 1\n__y = 2\nz = 3")
    assert (dict(kept.values), kept.not_kept) == ({"z": "3"}, ())


async def test_functions_that_are_replaced_for_replays_are_imported_ones(box: Lab) -> None:
    imports = "from time import time, sleep\nfrom os import listdir, urandom\nfrom sqlite3 import connect\n"
    kept = await kept_by(box, f"{imports}z = 3", program_id="run")
    assert (dict(kept.values), kept.not_kept) == ({"z": "3"}, ())


async def test_what_cannot_be_kept_is_named(box: Lab) -> None:
    code = (
        "class Thing: pass\ndef f(): pass\nthing, gen, op = Thing(), (i for i in ()), open('/dev/null')\n"
        "loop = []; loop.append(loop)\ndeep = []\nfor _ in range(5000): deep = [deep]\n"
        "lone = '\\ud800'; big = 1 << 5000; obj = object(); fine = 1"
    )
    kept = await kept_by(box, code)
    assert dict(kept.values) == {"fine": "1"}
    assert set(kept.not_kept) == {
        "Thing", "f", "thing", "gen", "op", "loop", "deep", "lone", "big", "obj",
    }  # fmt: skip


async def test_names_of_methods_and_built_ins_are_not_taken_over(box: Lab) -> None:
    kept = await kept_by(box, "echo = 1\nprint = 2\nalice = 3\nMethodError = 4\nfine = 5")
    assert dict(kept.values) == {"fine": "5"}
    assert set(kept.not_kept) == {"echo", "print", "alice", "MethodError"}
    hostile = {"echo": "1", "print": "2", "alice": "3", "_ck": '"other"', "__builtins__": "{}", "fine": "5"}
    result = await box.run("print(callable(echo), _ck, fine)", variables=hostile)
    assert result.output == "True chat 5\n"


async def test_bytes_and_number_are_bounded(box: Lab) -> None:
    kept = await kept_by(box, "small = 1\nbig = 'x' * 100_000\nlate = 2", keep_bytes=1024)
    assert (dict(kept.values), kept.not_kept) == ({"small": "1", "late": "2"}, ("big",))
    many = await kept_by(box, "globals().update({f'v{i}': i for i in range(1000)})")
    assert len(many.values) == MOST_VARIABLES and len(many.not_kept) == MOST_VARIABLES


async def test_a_value_of_many_quotes_within_the_limit_fits_into_the_frame(box: Lab) -> None:
    kept = await kept_by(box, "x = ['\"'] * 10_000", keep_bytes=64 << 10)
    assert set(kept.values) == {"x"}


async def test_nothing_is_kept_unless_it_is_asked_for(box: Lab) -> None:
    assert (await box.run("x = 1")).kept is None
    result = await box.run(RAW + KEEP + "frame(KEEP, 0, b'[[],{}]')\ntime.sleep(30)")
    assert result.stop_type is StopType.SECURITY


@pytest.mark.extended
async def test_a_killed_run_leaves_nothing(tmp_path: Path) -> None:
    async with lab(tmp_path, wall_seconds=3) as box:
        result = await left_by(box, "x = 1\nwhile True: pass")
        assert (result.stop_type, result.kept) == (StopType.TIMEOUT, None)
        forged = RAW + KEEP + 'frame(KEEP, 0, b\'[[],{"x":"1"}]\')\nwhile True: pass'
        assert (await left_by(box, forged)).kept is None
        ended = await left_by(box, "import os, signal\nx = 1\nos.kill(os.getpid(), signal.SIGKILL)")
        assert (ended.stop_type, ended.kept) == (StopType.ERROR, None)


async def test_a_fork_sends_nothing(box: Lab) -> None:
    kept = await kept_by(
        box, "import os\nx = 1\npid = os.fork()\nif not pid:\n    x = 2\nelse:\n    os.waitpid(pid, 0)"
    )
    assert kept.values["x"] == "1"


@pytest.mark.parametrize(
    "frames",
    [
        "frame(KEEP, 0, b'[[],{}]'); frame(KEEP, 0, b'[[],{}]')",
        "frame(EXIT, 0, GOOD); frame(KEEP, 0, b'[[],{}]')",
        f"frame(KEEP, 0, b'', length={4 * MOST})",
    ],
    ids=["twice", "after EXIT", "too long"],
)
async def test_forged_frames_are_violations(box: Lab, frames: str) -> None:
    result = await left_by(box, RAW + KEEP + frames + "\ntime.sleep(30)")
    assert (result.stop_type, result.kept) == (StopType.SECURITY, None)


@pytest.mark.parametrize(
    "payload",
    [
        b"", b"{}", b"[]", b"[[],[]]", b"\xff", b"[[],{}] ", b'[[],{"x":"1","x":"2"}]',
        b"[" * 50_000, b'[["' + b"a" * 60_000 + b'"],{}]', b'[[],{"$pickle":["a","gASVAAA="]}]',
        b'[[],{"__class__":"1","_x":"1","a b":"1","class":"1","":"1","' + b"n" * 65 + b'":"1"}]',
        '[[],{"\uff58":"1"}]'.encode(), b'[[],{"x":1,"y":["1"],"z":null}]',
    ],
)  # fmt: skip
async def test_forged_payloads_keep_nothing(box: Lab, payload: bytes) -> None:
    kept = await kept_by(box, RAW + KEEP + f"frame(KEEP, 0, {payload!r})\nos._exit(0)")
    assert kept == KeptVariables()


@pytest.mark.parametrize(
    "text",
    [
        '{"$pickle":["x","gASVBgAAAAAAAACMAXiULg=="]}', '{"$nope":1}', "[" * 100 + "]" * 100, "1 ", "NaN",
        "1,2", "", "\ud800", '{"a":1,"a":2}', '{"$datetime":"no"}', "[" + "1," * 90_000 + "1]",
    ],
)  # fmt: skip
async def test_a_text_that_is_no_plain_value_is_not_kept(text: str) -> None:
    payload = json.dumps([[], {"bad": text, "good": "[1]"}], separators=(",", ":")).encode()
    kept = await read_kept(payload, reserved=frozenset(), most_bytes=MOST)
    assert (dict(kept.values), kept.not_kept) in [({"good": "[1]"}, ("bad",)), ({}, ())]
    assert "\ud800" in text or kept.values


async def test_reading_yields_to_the_loop_and_ends_within_its_budget() -> None:
    text = "[" + ",".join(['{"$decimal":"1.5"}'] * 3_000) + "]"
    payload = json.dumps([[], {f"v{i}": text for i in range(15)}], separators=(",", ":")).encode()
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count())
    kept = await read_kept(payload, reserved=frozenset(), most_bytes=1 << 20)
    counting.cancel()
    assert turns > 10
    assert len(kept.values) + len(kept.not_kept) == 15


async def test_no_more_texts_are_read_than_a_runner_sends() -> None:
    """Ten thousands of them, each of which is no value, would occupy the loop for half a second."""
    texts = {f"a{number}": "x" for number in range(MOST_VARIABLES)} | {"late": "1"}
    names = [f"b{number}" for number in range(40_000)]
    payload = json.dumps([names, texts], separators=(",", ":")).encode()
    kept = await read_kept(payload, reserved=frozenset(), most_bytes=MOST)
    assert (kept.values, kept.not_kept) == ({}, tuple(names[:MOST_VARIABLES]))


async def test_hostile_names_of_what_was_not_kept_do_not_reach_the_prompt() -> None:
    names = ["ok", "__import__", "</round>", "a b", "x" * 65, 7, None, "ok"]
    payload = json.dumps([names, {}], separators=(",", ":")).encode()
    assert (await read_kept(payload, reserved=frozenset(), most_bytes=MOST)).not_kept == ("ok",)


async def test_a_call_that_waits_and_one_that_fails_change_nothing(box: Lab) -> None:
    box.handlers["later"] = lambda: Raised(error_type="E", message="no")
    kept = await kept_by(box, "x = 1\ntry:\n    later()\nexcept Exception as exc:\n    why = str(exc)")
    assert dict(kept.values) == {"x": "1", "why": '"E: no"'}


async def test_output_over_its_limit_leaves_nothing(tmp_path: Path) -> None:
    async with lab(tmp_path, output_keep_bytes=1024) as box:
        result = await left_by(box, "x = 1\nwhile True: print('y' * 1000)")
        assert (result.limit, result.kept) == (Limit.OUTPUT, None)


def test_reserved_names_are_those_that_code_finds() -> None:
    assert reserved_names([method("echo")]) >= {"echo", "alice", "print", "list", *OWN_NAMES}
    assert not any(map(is_variable, ["class", "None", "_a", "1a", "", "a.b", "ﬁ", 3]))
    assert all(map(is_variable, ["a", "größe", "数据", "x1"]))
