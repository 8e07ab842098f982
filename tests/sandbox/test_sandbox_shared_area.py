"""Emptying the shared directories of idle chats."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

from sandbox_lab import lab
from waiting import wait_until

from nekro.sandbox.drivers.bwrap import BwrapDriver
from nekro.sandbox.shared import Hold, empty_idle


def make(parent: Path, name: str) -> Path:
    directory = parent / name
    (directory / "deep").mkdir(parents=True)
    (directory / "deep" / "file").write_text("x")
    return directory


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_idle_directory_is_emptied_and_kept(tmp_path: Path) -> None:
    directory = make(tmp_path, "idle")
    assert empty_idle(tmp_path, idle_seconds=-1) == 1
    assert names(tmp_path) == ["idle"]
    assert names(directory) == []
    assert empty_idle(tmp_path, idle_seconds=-1) == 0


def test_recently_used_directory_is_not_emptied(tmp_path: Path) -> None:
    directory = make(tmp_path, "fresh")
    assert empty_idle(tmp_path, idle_seconds=3600) == 0
    # Times that a program can set do not count.
    for path in (directory, directory / "deep", directory / "deep" / "file"):
        os.utime(path, (0, 0))
    assert empty_idle(tmp_path, idle_seconds=3600) == 0


def test_directory_of_a_sandbox_is_not_emptied_until_it_ends(tmp_path: Path) -> None:
    directory = make(tmp_path, "held")
    first, second = Hold(directory), Hold(directory)
    first.release()
    assert empty_idle(tmp_path, idle_seconds=-1) == 0
    second.release()
    assert empty_idle(tmp_path, idle_seconds=-1) == 1
    assert names(directory) == []


HOLDER = (
    "import sys\nfrom pathlib import Path\nfrom nekro.sandbox.shared import Hold\nHold(Path(sys.argv[1]))\n"
)


def test_lock_of_another_process_counts_and_ends_with_it(tmp_path: Path) -> None:
    directory = make(tmp_path, "held")
    code = HOLDER.replace("Hold(Path", "hold = Hold(Path") + "print('held', flush=True)\nsys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", code, str(directory)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        assert empty_idle(tmp_path, idle_seconds=-1) == 0
        process.kill()
    assert empty_idle(tmp_path, idle_seconds=-1) == 1


def test_links_and_files_beside_the_directories_are_unchanged(tmp_path: Path) -> None:
    outside = make(tmp_path, "outside")
    parent = tmp_path / "parent"
    parent.mkdir()
    (parent / "link").symlink_to(outside)
    (parent / "file").write_text("x")
    assert empty_idle(parent, idle_seconds=-1) == 0
    assert (outside / "deep" / "file").exists()


async def test_manager_empties_idle_directories_but_not_those_of_a_run(
    bwrap_driver: BwrapDriver, tmp_path: Path
) -> None:
    async with lab(tmp_path, use=bwrap_driver, shared_idle_seconds=0.5) as box:
        await box.run("open('shared/old.txt', 'w')", chat_key="idle")
        swept = asyncio.Event()

        async def wait_for_sweep() -> None:
            await asyncio.to_thread(wait_until, lambda: names(box.shared("idle")) == [], what="the sweep")
            swept.set()

        box.handlers["wait"] = wait_for_sweep
        code = "import os\nopen('shared/mine.txt', 'w')\nwait()\nprint(os.listdir('shared'))"
        result = await box.run(code, chat_key="busy")
    assert swept.is_set()
    assert result.output == "['mine.txt']\n"
