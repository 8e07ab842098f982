"""Attacks on what lets a program be run again: its readings, and the originals of its files."""

from __future__ import annotations

from typing import Any

import pytest
from sandbox_lab import Lab
from test_sandbox_attacks_rpc import LINGER, RAW, is_security
from test_sandbox_undo import _state as state_of

from nekro.sandbox.models import NOT_RESUMABLE, RunResult, StubCall, StubResult
from nekro.sandbox.undo import NotUndoneError, undo_changes
from nekro_agent.layout import UNDO_NAME


async def attempt(box: Lab, code: str, **changes: Any) -> tuple[RunResult, list[str]]:
    """Run a program that may be run again; returns also the readings of its calls."""
    readings: list[str] = []

    async def dispatch(call: StubCall) -> StubResult:
        readings.append(call.readings)
        return await box.dispatch(call)

    return await box.run(code, **{"program_id": "run", "dispatch": dispatch, **changes}), readings


@pytest.mark.parametrize(
    "name",
    ["echo~T1", "echo~t1|9", "echo~t1 ", "echo~!t1", "echo~t1\\n", "echo~t1~t2", "echo~" + "t1," * 30_000],
    ids=["letter", "separator of marks", "space", "lost", "line", "twice", "much"],
)
async def test_attack_malformed_readings_end_the_run(box: Lab, name: str) -> None:
    result, readings = await attempt(box, f"{RAW}\nframe(CALL, 1, b'{name}' + b'\\0' + NOTHING){LINGER}")
    assert is_security(result), result
    assert readings == []


async def test_attack_many_readings_end_the_run(box: Lab) -> None:
    code = f"""{RAW}
for number in range(1, 25):
    frame(CALL, number, b"echo~" + b"t1," * 20_000 + b"\\0" + NOTHING)
    os.read(3, 1 << 16)
{LINGER}"""
    result, readings = await attempt(box, code)
    assert is_security(result), result
    assert sum(map(len, readings)) <= 1 << 20


async def test_attack_readings_of_the_end_are_checked(box: Lab) -> None:
    code = f"{RAW}\nframe(EXIT, 0, GOOD.replace(b'}}', b', \"readings\": \"~t1|\"}}'))\nos._exit(0)"
    result, _ = await attempt(box, code)
    assert result.readings == "" and result.stop_type.name == "SECURITY", result


async def test_attack_sandbox_cannot_name_the_id_of_a_call(box: Lab) -> None:
    ids: list[str] = []

    async def dispatch(call: StubCall) -> StubResult:
        ids.append(call.call_id)
        return await box.dispatch(call)

    def next_id(token: str, arguments: bytes, readings: str) -> str:
        return f"of the host {len(ids)}"

    code = f"""{RAW}
for number in (1, 2, 3):
    frame(CALL, number, b"echo\\0" + NOTHING)
    os.read(3, 4096)
"""
    await attempt(box, code, dispatch=dispatch, call_id=next_id)
    assert ids == [f"of the host {number}" for number in range(3)]


@pytest.mark.parametrize(
    "code",
    [
        f"import os\nos.symlink('/etc', '{UNDO_NAME}')\nWRITE",
        f"import os\nos.symlink('/app/uploads', '{UNDO_NAME}')\nWRITE",
        f"open('{UNDO_NAME}', 'w').close()\nWRITE",
        f"import os\nWRITE\nos.rename('{UNDO_NAME}', 'mine')\nos.symlink('mine', '{UNDO_NAME}')",
    ],
    ids=["link to the system", "link to uploads", "file", "renamed"],
)
async def test_attack_originals_that_lead_elsewhere_are_not_put_back(box: Lab, code: str) -> None:
    (box.shared() / "kept").write_text("kept")
    (box.shared() / "kept").chmod(0o666)
    write = "open('kept', 'w').write('changed')"
    result, readings = await attempt(box, f"{code.replace('WRITE', write)}\necho()")
    assert result.error is None, result
    with pytest.raises(NotUndoneError):
        await attempt(box, "print(1)")
    assert readings in ([""], [NOT_RESUMABLE])


async def test_attack_index_that_grows_without_end_ends_resumption(box: Lab) -> None:
    code = """
import os
for number in range(4000):
    name = f"{number}" + "\\x01" * 200
    open(name, "w").close()
    os.remove(name)
echo()
"""
    result, readings = await attempt(box, code)
    assert result.error is None and readings == [NOT_RESUMABLE]
    with pytest.raises(NotUndoneError, match="not followed"):
        undo_changes(box.shared(), "run")


RACE = """
import os, random, threading, time
def work():
    chance = random.Random(os.urandom(4))
    while True:
        name, other = f"f{chance.randrange(8)}", f"f{chance.randrange(12)}"
        try:
            chance.choice((
                lambda: open(name, "a").write("x"), lambda: open(name, "w").write("y"),
                lambda: os.remove(name), lambda: os.replace(name, other), lambda: os.truncate(name, 3),
                lambda: os.mkdir(other), lambda: os.rmdir(other), lambda: os.link(name, other),
            ))()
        except OSError:
            pass
for _ in range(FORKS): os.fork()
for _ in range(THREADS): threading.Thread(target=work, daemon=True).start()
time.sleep(0.5)
os._exit(0)
"""


@pytest.mark.parametrize(("forks", "threads"), [(0, 4), (2, 1), (1, 2)])
async def test_attack_threads_and_forks_that_race_leave_what_was_there(
    box: Lab, forks: int, threads: int
) -> None:
    root = box.shared()
    for number in range(8):
        (root / f"f{number}").write_text(f"{number}" * 1000)
        (root / f"f{number}").chmod(0o666)
    before = state_of(root)
    await attempt(box, RACE.replace("FORKS", str(forks)).replace("THREADS", str(threads)))
    try:
        assert undo_changes(root, "run")
    except NotUndoneError:  # one process removed what another was about to save
        assert forks
        return
    assert {name: content for name, (_, content) in state_of(root).items()} == {
        name: content for name, (_, content) in before.items()
    }
