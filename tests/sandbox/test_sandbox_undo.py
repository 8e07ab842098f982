"""What a program has changed in its files is undone before it is run again."""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sandbox_lab import Lab

from nekro.sandbox import undo
from nekro.sandbox.models import NOT_RESUMABLE, Returned, RunResult, StubCall, StubResult
from nekro.sandbox.undo import NotUndoneError, forget_changes, undo_changes, undo_name
from nekro_agent.layout import UNDO_NAME

#: Each step changes files in its own way; the process kills itself after so many of them.
STEPS = """
import os, pathlib, shutil, sqlite3
left = KILL
def step():
    global left
    left -= 1
    if left == 0:
        os.kill(os.getpid(), 9)
open("new.txt", "w").write("new")
step()
with open("short.txt", "a") as file:
    file.write("more")
step()
with open("long.txt", "a") as file:
    file.write("more")
step()
pathlib.Path("replaced.txt").write_text("in place")
step()
with open("new.part", "w") as file:
    file.write("atomic")
step()
os.replace("new.part", "replaced.txt")
step()
os.remove("removed.txt")
step()
os.rename("moved.txt", "deep/moved.txt")
step()
os.makedirs("a/b/c")
pathlib.Path("a/b/c/x").write_bytes(b"x")
step()
shutil.rmtree("tree")
step()
os.rename("deep", "deeper")
step()
os.symlink("long.txt", "alias")
with open("alias", "r+") as file:
    file.seek(4)
    file.write("via a link")
step()
base = sqlite3.connect("data.db")
base.execute("insert into numbers values (2)")
base.commit()
base.close()
step()
os.truncate("long.txt", 100)
os.chmod("short.txt", 0o600)
step()
for number in range(30):
    with open(f"{number}.part", "w") as file:
        file.write(str(number))
    os.replace(f"{number}.part", "counter.txt")
step()
descriptor = os.open("short.txt", os.O_WRONLY)
os.write(descriptor, b"by descriptor")
os.close(descriptor)
step()
os.unlink("link")
os.link("counter.txt", "second")
step()
shutil.move("counter.txt", "/tmp/elsewhere")
step()
if os.fork() == 0:
    open("by a fork.txt", "w").close()
    os.remove("forked.txt")
    os._exit(0)
os.wait()
step()
"""
COUNT = STEPS.count("\nstep()")


def _prepare(box: Lab, chat_key: str) -> Path:
    root = box.shared(chat_key)
    (root / "deep").mkdir()
    (root / "tree" / "x" / "y").mkdir(parents=True)
    texts = {
        "short.txt": "short\n",
        "long.txt": "0123456789" * 5000,
        "replaced.txt": "old",
        "removed.txt": "gone",
        "moved.txt": "moved",
        "counter.txt": "first",
        "forked.txt": "forked",
        "deep/inner.txt": "inner",
        "tree/x/file": "in a tree",
    }
    for name, text in texts.items():
        (root / name).write_text(text)
    (root / "link").symlink_to("long.txt")
    return root


async def _make_base(box: Lab, chat_key: str) -> None:
    """Give the files to the code's user, and make the database in the sandbox: its SQLite may be older."""
    code = "import sqlite3\nb = sqlite3.connect('data.db')\nb.execute('create table numbers (x)')\nb.commit()"
    assert (await box.run(code, chat_key=chat_key)).error is None


def _state(root: Path) -> dict[str, tuple[int, str]]:
    """Describe each file: its mode, and its content."""
    state = {}
    for path in root.rglob("*"):
        name = path.relative_to(root).as_posix()
        if name.partition("/")[0] == UNDO_NAME:
            continue
        info = path.lstat()
        content = "a directory"
        if stat.S_ISLNK(info.st_mode):
            content = f"a link to {os.readlink(path)}"
        elif stat.S_ISREG(info.st_mode):
            content = hashlib.sha256(path.read_bytes()).hexdigest()
        state[name] = (info.st_mode, content)
    return state


async def _attempt(box: Lab, code: str, **changes: Any) -> RunResult:
    return await box.run(code, **{"program_id": "run", **changes})


async def test_killed_program_leaves_the_files_of_one_undisturbed_run(box: Lab) -> None:
    root = _prepare(box, "undisturbed")
    await _make_base(box, "undisturbed")
    result = await _attempt(box, STEPS.replace("KILL", "0"), chat_key="undisturbed")
    assert result.error is None, result
    expected = _state(root)
    for kill in range(1, COUNT + 1):
        chat_key = f"killed-{kill}"
        root = _prepare(box, chat_key)
        await _make_base(box, chat_key)
        before = _state(root)
        result = await _attempt(box, STEPS.replace("KILL", str(kill)), chat_key=chat_key)
        assert result.exit_code == 137, (kill, result)
        assert undo_changes(root, "run")
        assert _state(root) == before, kill
        await _attempt(box, STEPS.replace("KILL", str(COUNT - kill)), chat_key=chat_key)
        result = await _attempt(box, STEPS.replace("KILL", "0"), chat_key=chat_key)
        assert result.error is None, (kill, result)
        assert _state(root) == expected, kill
        await box.manager.forget("run", chat_key=chat_key, container_key=box.container(chat_key))
        assert not (root / UNDO_NAME).exists()


async def test_interrupted_undo_is_finished_by_the_next_one(
    box: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = _prepare(box, "chat")
    await _make_base(box, "chat")
    before = _state(root)
    await _attempt(box, STEPS.replace("KILL", "0"))
    steps = [
        getattr(undo, name) for name in ("_remove", "_make_directory", "_replace", "_shorten", "_make_link")
    ]

    def interrupt_after(count: int, patch: pytest.MonkeyPatch) -> None:
        left = iter(range(count))

        def interrupted(step: Callable[..., None]) -> Callable[..., None]:
            def call(*args: Any) -> None:
                if next(left, None) is None:
                    raise KeyboardInterrupt
                step(*args)

            return call

        for step in steps:
            patch.setattr(undo, step.__name__, interrupted(step))

    for count in (0, 1, 30, 40, 45, 50):
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            interrupt_after(count, patch)
            undo_changes(root, "run")
    assert undo_changes(root, "run")
    assert _state(root) == before
    assert not undo_changes(root, "run")


async def test_run_that_is_not_resumable_saves_nothing(box: Lab) -> None:
    await box.run("open('x', 'w').close()")
    assert [path.name for path in box.shared().iterdir()] == ["x"]


async def test_run_that_changes_nothing_saves_nothing(box: Lab) -> None:
    await _attempt(box, "import tempfile\ntempfile.TemporaryFile()\nopen('/tmp/x', 'w').close()\nprint(1)")
    assert list(box.shared().iterdir()) == []


async def test_code_does_not_list_what_was_saved(box: Lab) -> None:
    code = """
import glob, os, pathlib, shutil
open("x", "w").close()
print(os.listdir(), [entry.name for entry in os.scandir()], os.listdir(b"."), os.listdir("/app/shared"))
print(glob.glob("*", include_hidden=True), list(pathlib.Path().rglob("*")), list(os.walk(".")))
"""
    result = await _attempt(box, code)
    assert result.output == ("['x'] ['x'] [b'x'] ['x']\n['x'] [PosixPath('x')] [('.', [], ['x'])]\n")


async def test_other_runs_of_a_chat_leave_what_a_lost_one_saved(box: Lab) -> None:
    (box.shared() / "log").write_text("a\n")
    code = "open('log', 'a').write('b\\n')"
    await _attempt(box, code, program_id="lost")
    await _attempt(box, "open('other', 'w').close()", program_id="next")
    await _attempt(box, code, program_id="lost")
    assert (box.shared() / "log").read_text() == "a\nb\n"
    assert (box.shared() / "other").exists()


@pytest.mark.parametrize(
    "code",
    [
        "import subprocess\nsubprocess.run(['true'])",
        "import os\nos.system('true')",
        "open('large', 'r+').close()",
    ],
    ids=["subprocess", "system", "large"],
)
async def test_changes_that_cannot_be_followed_are_told(
    box: Lab, monkeypatch: pytest.MonkeyPatch, code: str
) -> None:
    monkeypatch.setattr("nekro.sandbox.run.MOST_UNDO_BYTES", 1 << 20)
    with (box.shared() / "large").open("wb") as file:
        file.truncate(2 << 20)
    readings: list[str] = []

    async def dispatch(call: StubCall) -> StubResult:
        readings.append(call.readings)
        return await box.dispatch(call)

    result = await _attempt(box, f"echo()\n{code}\necho()\nopen('x', 'w').close()", dispatch=dispatch)
    assert result.error is None
    assert readings == ["", NOT_RESUMABLE]
    with pytest.raises(NotUndoneError, match="not followed"):
        await _attempt(box, "print(1)")


@pytest.mark.parametrize(("names", "expected"), [("'out.txt'", NOT_RESUMABLE), ("'other.txt'", "")])
async def test_method_that_changes_a_file_of_the_program_ends_resumption(
    box: Lab, names: str, expected: str
) -> None:
    readings: list[str] = []

    async def dispatch(call: StubCall) -> StubResult:
        readings.append(call.readings)
        if len(readings) == 1:
            with (box.shared() / "out.txt").open("a") as file:
                file.write("by the method")
        return Returned(value=b"null")

    code = f"with open('out.txt', 'w') as f: f.write('x')\necho({names})\necho()"
    result = await _attempt(box, code, dispatch=dispatch)
    assert result.error is None
    assert readings == ["", expected]


async def test_files_that_methods_wrote_stay(box: Lab) -> None:
    async def dispatch(call: StubCall) -> StubResult:
        (box.shared() / "made" / "by-method.txt").write_text("kept")
        return Returned(value=b"null")

    code = "import os\nos.mkdir('made')\nos.chmod('made', 0o777)\nopen('made/x', 'w').close()\necho()"
    await _attempt(box, code, dispatch=dispatch)
    assert undo_changes(box.shared(), "run")
    assert [path.name for path in (box.shared() / "made").iterdir()] == ["by-method.txt"]


async def test_changes_of_others_after_the_noted_end_are_not_undone(
    box: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, code = box.shared(), "open('log', 'a').write('own')\nopen('new', 'w').close()"
    (root / "log").write_text("before ")
    os.chmod(root / "log", 0o666)
    names = {"chat_key": "chat", "container_key": box.container()}
    for change in ("other", ""):
        await _attempt(box, code)
        await box.manager.note_ends("run", **names)
        with (root / "log").open("a") as log:
            log.write(change)
        if change:
            with pytest.raises(NotUndoneError, match="another program of the chat, has changed 'log'"):
                undo_changes(root, "run")
            assert (root / "log").read_text() == "before ownother"
            (root / "log").write_text("before ")
            (root / "new").unlink()
            await box.manager.forget("run", **names)
    # An interrupted one is finished, although files differ from the noted end then.
    with monkeypatch.context() as patch:
        patch.setattr(undo, "_replace", lambda *_: 1 / 0)
        patch.setattr(undo, "_shorten", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            undo_changes(root, "run")
    assert not (root / "new").exists()
    assert undo_changes(root, "run")
    assert (root / "log").read_text() == "before "


async def test_signal_that_raises_while_a_file_is_saved_reaches_the_code(box: Lab) -> None:
    code = """
import signal
def raises(*_):
    signal.setitimer(signal.ITIMER_REAL, 0)
    raise ValueError("by the handler")
signal.signal(signal.SIGALRM, raises)
caught = number = 0
while caught < 30:
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.0005)
        while True:
            number += 1
            with open(f"file-{number % 500}", "w") as file:
                file.write("x")
    except ValueError:
        caught += 1
"""
    assert (await _attempt(box, code)).error is None
    assert undo_changes(box.shared(), "run")
    assert list(box.shared().iterdir()) == []


async def test_code_that_closes_every_descriptor_still_saves(box: Lab) -> None:
    code = "import os\nopen('a', 'w')\nos.closerange(4, 1000)\nopen('b', 'w').close()\nopen('c', 'w')"
    await _attempt(box, code)
    assert undo_changes(box.shared(), "run")
    assert list(box.shared().iterdir()) == []


def _forge(root: Path, *records: Any, program_id: str = "run", saved: bytes | None = None) -> Path:
    directory = root / UNDO_NAME / undo_name(program_id)
    directory.mkdir(parents=True)
    (directory / "index").write_text("".join(json.dumps(record) + "\n" for record in records))
    if saved is not None:
        (directory / "1-1").write_bytes(saved)
    return directory


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """A directory beside the shared files that no undo may touch."""
    path = tmp_path / "outside"
    path.mkdir()
    (path / "secret").write_text("secret")
    return path


@pytest.fixture
def root(tmp_path: Path, outside: Path) -> Path:
    path = tmp_path / "shared"
    path.mkdir()
    (path / "link").symlink_to("../outside")
    (path / "file").write_text("x")
    return path


NOW = 1_700_000_000_000_000_000


@pytest.mark.parametrize(
    "record",
    [
        ["../outside/secret", "absent", 0, 0, 0, "", 0],
        ["/etc/passwd", "absent", 0, 0, 0, "", 0],
        ["link/secret", "absent", 0, 0, 0, "", 0],
        ["link/secret", "size", 0, 0o777, NOW, "", 0],
        ["link/new", "file", 1, 0o777, NOW, "1-1", 0],
        ["link/new", "directory", 0, 0o777, NOW, "", 0],
        ["link/new", "symlink", 0, 0o777, NOW, "/etc/passwd", 0],
        ["file", "file", 1, 0o777, NOW, "../../../outside/secret", 0],
        ["file", "file", 1, 0o777, NOW, "..", 0],
        ["file", "file", 1 << 62, 0o777, NOW, "1-1", 0],
        ["file", "size", 1 << 62, 0o777, NOW, "", 0],
        ["file", "size", -1, 0o777, NOW, "", 0],
        ["file", "size", 0, 0o777, 1 << 80, "", 0],
        ["file", "size", True, 0o777, NOW, "", 0],
        ["file", "unknown", 0, 0o777, NOW, "", 0],
        [f"{UNDO_NAME}/x", "absent", 0, 0, 0, "", 0],
        ["a\0b", "absent", 0, 0, 0, "", 0],
        ["", "absent", 0, 0, 0, "", 0],
        [1, "absent", 0, 0, 0, "", 0],
        ["file"],
        {"a": 1},
        "x",
        7,
        None,
        ["/".join("d" * 200), "directory", 0, 0o777, NOW, "", 0],
        ["a" * 300, "directory", 0, 0o777, NOW, "", 0],
    ],
)
def test_attack_forged_index_touches_nothing_outside(root: Path, outside: Path, record: Any) -> None:
    directory = _forge(root, record, saved=b"x")
    try:
        undo_changes(root, "run")
    except NotUndoneError:
        assert directory.exists()
    assert [path.name for path in outside.iterdir()] == ["secret"]
    assert (outside / "secret").read_text() == "secret"
    assert stat.S_IMODE((outside / "secret").stat().st_mode) != 0o777


def test_attack_setuid_bit_is_not_restored(root: Path) -> None:
    _forge(root, ["file", "file", 1, 0o6777, NOW, "1-1", 0], saved=b"y")
    assert undo_changes(root, "run")
    assert stat.S_IMODE((root / "file").stat().st_mode) == 0o777


@pytest.mark.parametrize("what", ["link", "fifo", "directory", "hard link"])
@pytest.mark.parametrize("name", ["index", "1-1"])
def test_attack_saved_file_that_is_something_else(root: Path, outside: Path, what: str, name: str) -> None:
    directory = _forge(root, ["file", "file", 0, 0o777, NOW, "1-1", 0], saved=b"x")
    (directory / name).unlink()
    if what == "link":
        (directory / name).symlink_to(outside / "secret")
    elif what == "fifo":
        os.mkfifo(directory / name)
    elif what == "directory":
        (directory / name).mkdir()
    else:
        os.link(outside / "secret", directory / name)
    with pytest.raises(NotUndoneError):
        undo_changes(root, "run")
    assert (outside / "secret").read_text() == "secret"
    forget_changes(root, "run")
    assert not (root / UNDO_NAME).exists()
    assert (outside / "secret").read_text() == "secret"


@pytest.mark.parametrize("at", [UNDO_NAME, f"{UNDO_NAME}/{undo_name('run')}"])
def test_attack_directory_that_is_a_link(root: Path, outside: Path, at: str) -> None:
    (root / at).parent.mkdir(exist_ok=True)
    (root / at).symlink_to(outside)
    (outside / undo_name("run")).mkdir()
    (outside / undo_name("run") / "index").write_text('["secret", "absent", 0, 0, 0, "", 0]\n')
    (outside / "index").write_text('["secret", "absent", 0, 0, 0, "", 0]\n')
    with pytest.raises(NotUndoneError):
        undo_changes(root, "run")
    forget_changes(root, "run")
    assert (outside / "secret").exists()
    assert (outside / undo_name("run") / "index").exists()


def test_attack_huge_index_is_refused(root: Path) -> None:
    directory = _forge(root)
    with (directory / "index").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(NotUndoneError):
        undo_changes(root, "run")


def test_attack_deeply_nested_line_is_refused(root: Path) -> None:
    directory = _forge(root)
    (directory / "index").write_text("[" * 1_000_000 + "\n")
    with pytest.raises(NotUndoneError):
        undo_changes(root, "run")


def test_line_that_was_being_written_is_left_out(root: Path) -> None:
    directory = _forge(root, ["new", "absent", 0, 0, 0, "", 0])
    (root / "new").write_text("x")
    with (directory / "index").open("a") as file:
        file.write('["file", "absent", 0')
    assert undo_changes(root, "run")
    assert not (root / "new").exists()
    assert (root / "file").exists()


def test_attack_original_that_was_removed_is_missed(root: Path) -> None:
    _forge(root, ["file", "file", 1, 0o644, NOW, "1-1", 0])
    with pytest.raises(NotUndoneError, match="is gone"):
        undo_changes(root, "run")
    os.utime(root / "file", ns=(NOW, NOW))  # as an undo leaves it that was interrupted then
    assert undo_changes(root, "run")


@pytest.mark.parametrize("tail", ["", "7878", "zz", "78" * 4000])
def test_attack_forged_end_of_a_file_is_compared_or_refused(root: Path, tail: str) -> None:
    (root / "file").write_text("xx and more")
    _forge(root, ["file", "size", 2, 0o644, NOW, tail, 0])
    if tail in ("", "7878"):
        assert undo_changes(root, "run")
        assert (root / "file").read_text() == "xx"
    else:
        with pytest.raises(NotUndoneError):
            undo_changes(root, "run")


def test_attack_deep_and_many_names_among_the_originals_are_removed(root: Path) -> None:
    directory = _forge(root)
    for number in range(3000):
        (directory / f"{number}").touch()
    fd = os.open(directory, os.O_RDONLY)
    for _ in range(2000):
        os.mkdir("d", dir_fd=fd)
        inner = os.open("d", os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd = inner
    os.close(fd)
    forget_changes(root, "run")
    assert not (root / UNDO_NAME).exists()


def test_oldest_of_many_runs_are_dropped(root: Path) -> None:
    for number in range(40):
        directory = _forge(root, program_id=str(number))
        os.utime(directory, ns=(NOW, NOW + number))
    assert not undo_changes(root, "another")
    kept = {path.name for path in (root / UNDO_NAME).iterdir()}
    assert kept == {undo_name(str(number)) for number in range(8, 40)}
