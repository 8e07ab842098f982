"""No file of a data directory is readable for other users of the host, independent of its creator."""

from __future__ import annotations

import json
import os
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from forked_process import run_forked

from broker_config.embedded import make_data_dir
from broker_config.settings import Settings
from nekro.cli.commands.demo import load_demo
from nekro_agent.files import private_files, safe_files

pytestmark = pytest.mark.extended

MOUNTS_A_CONFIG = """
from nekro_agent.api.plugin import ConfigBase, NekroPlugin

plugin = NekroPlugin("Mail", "mail", "", "1", "Ada", "")

@plugin.mount_config()
class Config(ConfigBase):
    TOKEN: str = "secret"
"""
OTHERS = 0o077

#: Paths below a data directory with permission bits for other users, by their first two parts,
#: with the reason. Each lies below a directory that only this user can enter.
EXCEPTIONS = {
    "uploads": "root mode: sandboxed code of another host user reads them through its bind mount",
    "sandboxes": "belongs to the sandboxed code, which chooses the modes of its own files",
    "plugins": "plugin code creates files there by itself, with the umask of the worker",
    "layers": "published packages, bound into the sandboxes of other host users",
}


@pytest.fixture
def open_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


def run(*arguments: str, cwd: Path, umask: int, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("NEKRO_")}
    return run_forked("nekro.cli.main", *arguments, environ=clean | environment, cwd=cwd, umask=umask)


def wide_open(root: Path) -> list[str]:
    """Everything with permission bits for others, except sockets, which their directory protects."""
    return sorted(
        str(path.relative_to(root))
        for path in root.rglob("*")
        if not path.is_symlink() and not path.is_socket() and mode_of(path) & OTHERS
    )


@pytest.fixture(scope="module")
def tour(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The data directory of a tour under umask 0, and what the tour printed."""
    directory = tmp_path_factory.mktemp("tour")
    done = run("--data-dir", str(directory / "data"), "demo", "--json", cwd=directory, umask=0)
    assert done.returncode == 0, done.stdout + done.stderr
    return directory / "data", json.loads(done.stdout)


def test_the_tour_passes_every_point(tour: tuple[Path, dict[str, Any]]) -> None:
    _, printed = tour
    left = [point for point in printed["points"] if not point["ok"] and not point["is_left_out"]]
    assert left == [] and len(printed["points"]) == 12
    assert len({entry["process"] for entry in printed["timeline"] if entry["process"]}) >= 5
    greeting = load_demo("scenes").GREETING
    assert any(greeting in entry["what"] for entry in printed["timeline"])


def test_the_tour_with_umask_0_leaves_nothing_readable_for_others(tour: tuple[Path, dict[str, Any]]) -> None:
    root, _ = tour
    names = {path.name for path in root.iterdir()}
    assert {"logs", "nekro.db", "plugins", "redis", "run", "sandboxes", "secrets"} <= names
    assert mode_of(root) == 0o700
    unexplained = [path for path in wide_open(root) if path.partition("/")[0] not in EXCEPTIONS]
    assert unexplained == []
    # The top directory of each exception is closed, even if the root were open.
    assert [name for name in EXCEPTIONS if (root / name).exists() and mode_of(root / name) & OTHERS] == []


def test_a_command_that_imports_a_plugin_creates_no_configuration(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "mail.py").write_text(MOUNTS_A_CONFIG)
    done = run("--data-dir", "data", "plugins", cwd=tmp_path, umask=0o022, NEKRO_PLUGINS__DIRS="mine")
    assert done.returncode == 0 and "Ada.mail" in done.stdout, done.stderr
    assert not (tmp_path / "data" / "configs").exists()
    assert [path for path in (tmp_path / "data",) if path.exists() and mode_of(path) & OTHERS] == []


def test_a_data_directory_of_an_older_version_is_closed_at_start(tmp_path: Path) -> None:
    root = tmp_path / "data"
    for path in (root, root / "configs", root / "uploads"):
        path.mkdir()
        path.chmod(0o755)
    (root / "nekro.db").write_text("rows")
    (root / "nekro.db").chmod(0o644)
    (root / "link").symlink_to("/etc")
    make_data_dir(Settings(data_dir=root))
    assert wide_open(root) == [] and mode_of(root) == 0o700
    assert mode_of(Path("/etc")) == 0o755


def test_permissions_of_a_directory_shared_by_all_users_are_unchanged(tmp_path: Path) -> None:
    shared = tmp_path / "tmp"
    shared.mkdir()
    shared.chmod(0o1777)
    make_data_dir(Settings(data_dir=shared))
    assert mode_of(shared) == 0o1777


@pytest.mark.skipif(os.geteuid() != 0, reason="as an ordinary user all code has the service's user")
def test_code_with_its_own_user_can_traverse_the_directory_without_mounts(
    tmp_path: Path, open_umask: None
) -> None:
    root = tmp_path / "data"
    settings = Settings.model_validate({"data_dir": root, "sandbox": {"driver": "landlock"}})
    (root / "uploads").mkdir(parents=True)
    (root / "uploads").chmod(0o700)
    make_data_dir(settings)
    private_files.make_directory(root / "layers" / "layers", passable=True)
    private_files.make_directory(root / "configs")
    modes = [mode_of(root / name) for name in ("", "uploads", "layers", "layers/layers", "configs")]
    assert modes == [0o711, 0o711, 0o711, 0o711, 0o700]


@pytest.mark.parametrize("umask", [0, 0o022, 0o077, 0o277])
def test_file_helpers_do_not_depend_on_the_umask(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        private_files.make_directory(tmp_path / "a" / "b")
        private_files.write_private(tmp_path / "c" / "f", "text")
        with private_files.open_private(tmp_path / "a" / "log", "a", encoding="utf-8") as file:
            file.write("line")
        safe_files.replace_file(tmp_path / "a", "d/e/f", b"x")
    finally:
        os.umask(before)
    assert wide_open(tmp_path) == []
    assert mode_of(tmp_path / "a" / "b") == mode_of(tmp_path / "a" / "d" / "e") == 0o700
    assert mode_of(tmp_path / "c" / "f") & 0o400 and (tmp_path / "a" / "d" / "e" / "f").read_bytes() == b"x"


def test_a_file_open_to_others_is_closed_when_it_is_rewritten(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("old\n")
    (tmp_path / "log").chmod(0o666)
    with private_files.open_private(tmp_path / "log", "a", encoding="utf-8") as file:
        file.write("new\n")
    assert mode_of(tmp_path / "log") == 0o600 and (tmp_path / "log").read_text() == "old\nnew\n"


def test_a_link_in_place_of_a_log_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("keep")
    (tmp_path / "log").symlink_to(tmp_path / "victim")
    with pytest.raises(OSError, match="symbolic links"):
        private_files.open_private(tmp_path / "log", "w")
    private_files.write_private(tmp_path / "log", "mine")
    assert (tmp_path / "victim").read_text() == "keep" and not (tmp_path / "log").is_symlink()


def test_new_entries_are_as_readable_as_their_directory(tmp_path: Path, open_umask: None) -> None:
    """In root mode the uploads are readable for the code, including files that a call adds during a run."""
    (tmp_path / "uploads").mkdir()
    (tmp_path / "uploads").chmod(0o755)
    safe_files.replace_file(tmp_path / "uploads", "d/f", b"x")
    assert [mode_of(tmp_path / "uploads" / name) for name in ("d", "d/f")] == [0o755, 0o644]
