"""Trees that sandboxed code shapes so that the host cannot list, measure or remove them."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest

from broker_config.settings import SandboxSettings
from nekro.sandbox.limits.processes import hold_of_all
from nekro.sandbox.limits.quota import Quota
from nekro.sandbox.shared import empty_idle
from nekro_agent.files import safe_files

REPOSITORY = Path(__file__).resolve().parents[2]
LIMITS = SandboxSettings(shared_bytes=1 << 20, shared_files=5000)
#: Deeper than Python's recursion limit and the usual limit of open descriptors.
BOTTOMLESS = 600


def dig(root: Path, depth: int, *, name: str = "d" * 60) -> None:
    """Nest directories in each other and write 2 MiB at the bottom."""
    fd = os.open(root, os.O_RDONLY)
    for _ in range(depth):
        os.mkdir(name, dir_fd=fd)
        inner = os.open(name, os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd = inner
    with open(os.open("big", os.O_WRONLY | os.O_CREAT, dir_fd=fd), "wb") as file:
        file.write(b"x" * (2 << 20))
    os.close(fd)


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    directory = tmp_path / "areas" / "box"
    directory.mkdir(parents=True)
    yield directory
    if directory.exists():  # pytest's own removal would fail if ours did
        safe_files.empty_directory(directory)


@pytest.mark.parametrize("depth", [31, 40, BOTTOMLESS])
def test_depth_hides_nothing_from_the_quota(root: Path, depth: int) -> None:
    quota = Quota.at_start(root, LIMITS)
    dig(root, depth)
    assert quota.exceeded()
    assert quota.cut_back(since=0) >= 0
    assert not quota.exceeded()


def test_long_paths_hide_nothing_from_the_quota(root: Path) -> None:
    quota = Quota.at_start(root, LIMITS)
    dig(root, 20, name="n" * 250)
    assert quota.exceeded()
    quota.cut_back(since=0)
    assert not quota.exceeded()


def test_files_from_before_a_run_do_not_raise_its_limits(root: Path) -> None:
    dig(root, 40)
    assert Quota.at_start(root, LIMITS).exceeded()


def test_ordinary_files_are_kept_when_hidden_ones_are_removed(root: Path) -> None:
    (root / "notes").mkdir()
    (root / "notes" / "kept.txt").write_text("kept")
    dig(root, 40)
    safe_files.remove_hidden(root)
    assert (root / "notes" / "kept.txt").read_text() == "kept"
    assert not any(node.is_hidden for node in safe_files.walk(root, max_entries=1000))


def test_bottomless_tree_is_removed_with_few_descriptors(root: Path) -> None:
    dig(root, BOTTOMLESS)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Only a few more descriptors than this process already uses.
    highest = max(int(name) for name in os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, highest + 100), hard))
    try:
        assert empty_idle(root.parent, idle_seconds=-1) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert list(root.iterdir()) == []


def test_vanished_descriptor_does_not_hide_the_next_one(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open(root / "nameless", "wb") as file:
        file.write(b"x" * (1 << 20))
        file.flush()
        os.fsync(file.fileno())
        (root / "nameless").unlink()
        listdir = os.listdir
        monkeypatch.setattr(os, "listdir", lambda path: ["99999"] * str(path).endswith("/fd") + listdir(path))
        assert hold_of_all(lambda: [os.getpid()], root=root).disk_bytes(most_file_bytes=0) >= 1 << 20


CLOSED = """
import json, os, sys
from pathlib import Path
from broker_config.settings import SandboxSettings
from nekro.sandbox.users import prepare_directories
from nekro.sandbox.shared import empty_idle
from nekro.sandbox.limits.quota import Quota

root, mode = Path(sys.argv[1]), int(sys.argv[2], 8)
settings = SandboxSettings(shared_bytes=1 << 20)
quota = Quota.at_start(root, settings)
(root / "in").mkdir()
(root / "in" / "deep").mkdir()
(root / "in" / "deep" / "big").write_bytes(b"x" * (2 << 20))
for path in (root / "in" / "deep", root / "in", root):
    path.chmod(mode)
exceeded = quota.exceeded()
for path in (root / "in" / "deep", root / "in", root):
    path.chmod(0o700)
(root / "in" / "deep").chmod(mode)
(root / "in").chmod(mode)
root.chmod(mode)
prepare_directories(shared_dir=root, uploads_dir=root, uid=os.geteuid(), settings=settings)
open_again = os.access(root, os.R_OK | os.W_OK | os.X_OK)
others = [root.with_name(f"other{number}") for number in range(20)]
for other in others:
    other.mkdir()
    (other / "file").touch()
root.chmod(mode)
emptied = empty_idle(root.parent, idle_seconds=-1)
print(json.dumps([exceeded, open_again, emptied, [os.listdir(path) for path in (root, *others)]]))
"""


def system_version() -> tuple[int, ...]:
    code = "import sys; print(*sys.version_info[:2])"
    said = subprocess.run(["/usr/bin/python3", "-c", code], capture_output=True, text=True, check=True)
    return tuple(map(int, said.stdout.split()))


@pytest.mark.parametrize("mode", ["300", "400", "000", "500"])
def test_inaccessible_directories_hide_nothing_from_a_service_of_the_same_user(
    passable_dir: Path, mode: str
) -> None:
    """Code that runs as the service's user can remove permissions of its directories, including the root."""
    command = [sys.executable]
    if os.geteuid() == 0:
        if shutil.which("setpriv") is None or not Path("/usr/bin/python3").exists():
            pytest.skip("root needs setpriv and a system Python to become somebody else")
        if system_version() != sys.version_info[:2]:
            pytest.skip("the system Python has another version than the installed packages")
        command = ["setpriv", "--reuid=64123", "--regid=64123", "--clear-groups", "/usr/bin/python3"]
    root = passable_dir / "box"
    root.mkdir()
    try:
        if os.geteuid() == 0:
            os.chown(passable_dir, 64123, 64123)
            os.chown(root, 64123, 64123)
        done = subprocess.run(
            [*command, "-c", CLOSED, str(root), mode],
            env={
                "PATH": os.environ["PATH"],
                "PYTHONPATH": f"{REPOSITORY}:{sysconfig.get_paths()['purelib']}",
            },
            cwd="/",
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout) == [True, True, 21, [[]] * 21]
    finally:
        root.chmod(0o700)
