"""`nekro files fsck` and `import`, and what `nekro doctor` says of a store."""

from __future__ import annotations

import os
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from nekro_shell import Shell, open_shell
from waiting import wait_until

from broker_config.settings import DatabaseSettings
from nekro.cli.running import ExitCode
from storage.engine import Database
from storage.files.host_files import HostFiles
from storage.files.stores.directory import DirectoryStore


@pytest.fixture
def shell(store_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Shell]:
    """A data directory with files from before its store."""
    paths = ("uploads/chat/a.txt", "uploads/chat/sub/b.txt", "sandboxes/box/c.txt", "configs/a.b.yaml")
    with open_shell({}) as shell:
        shell.environment["NEKRO_FILES__URL"] = store_url
        assert shell.inside("db", "upgrade").code == 0
        for path in paths:
            file = shell.data_dir / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(f"content of {path}")
        (shell.data_dir / "uploads/chat/link").symlink_to("a.txt")
        yield shell


def checks_of(shell: Shell) -> dict[str, str]:
    listed = shell.inside("doctor", "--json").value
    return {check["name"]: f"{check['verdict']}: {check['detail']}" for check in listed}


def test_files_of_a_data_directory_are_imported_once(shell: Shell) -> None:
    first = shell.inside("files", "import", "--json").value
    assert (first["imported"], first["known"]) == (3, 0)
    assert list(first["left_out"]) == ["uploads/chat/'link'"]
    assert (shell.data_dir / "uploads/chat/sub/b.txt").read_text() == "content of uploads/chat/sub/b.txt"
    assert (shell.data_dir / "uploads/chat/link").is_symlink()
    again = shell.inside("files", "import")
    assert again.code == 0 and "the store had 3; nothing was deleted" in again.err
    checked = shell.inside("files", "fsck", "--read")
    assert (checked.code, checked.out) == (0, "") and "checked 4 contents: 0 damaged" in checked.err


PLUGIN = """
from nekro_agent.api.plugin import NekroPlugin

plugin = NekroPlugin(
    name="{name}", module_name="{name}", description="", version="1", author="Ada", url=""
)
{code}
"""
PLUGINS = {
    "synced": "PATH = plugin.get_plugin_data_dir()",
    "pinned": "import sqlite3\nPATH = plugin.get_plugin_data_dir()",
    "local": "PATH = plugin.get_plugin_data_dir()",
    "unused": "",
}


@pytest.mark.parametrize("store_url", ["directory"], indirect=True)
def test_directories_of_plugins_are_imported_by_their_policy(shell: Shell) -> None:
    for name, code in PLUGINS.items():
        (shell.directory / "plugins" / f"{name}.py").write_text(PLUGIN.format(name=name, code=code))
    for name in (*PLUGINS, "removed"):
        file = shell.data_dir / f"plugins/Ada.{name}/sub/data"
        file.parent.mkdir(parents=True)
        file.write_text(name)
    shell.environment["NEKRO_FILES__PLUGIN_DIRS"] = "Ada.local=local"
    done = shell("files", "import", "--json")
    assert done.code == 0, done.err
    assert (done.value["imported"], done.value["known"]) == (5, 0)
    reasons = {name: text for name, text in done.value["left_out"].items() if name.startswith("plugin/")}
    assert reasons == {
        "plugin/Ada.local": "local: NEKRO_FILES__PLUGIN_DIRS names it",
        "plugin/Ada.unused": "unused: its code does not name the directory",
        "plugin/Ada.removed": "no plugin of this key is loaded here",
    }
    again = shell("files", "import", "--json").value
    assert (again["imported"], again["known"]) == (0, 5)


@pytest.mark.parametrize("store_url", ["directory"], indirect=True)
def test_an_import_that_is_killed_is_repeated(shell: Shell, store_url: str) -> None:
    for number in range(300):
        file = shell.data_dir / f"uploads/chat{number % 3}/{number}.txt"
        file.parent.mkdir(exist_ok=True)
        file.write_text(f"file {number}")
    objects = Path(store_url.removeprefix("file://"))
    process = shell.start("files", "import")
    wait_until(lambda: len([*objects.rglob("*.*")]) > 20 or process.poll() is not None, what="objects")
    process.kill()
    process.communicate()
    done = shell("files", "import", "--json").value
    assert done["imported"] + done["known"] == 6
    checked = shell.inside("files", "fsck", "--read")
    assert checked.code == 0 and "0 damaged" in checked.err
    assert len([*shell.data_dir.glob("uploads/chat*/*.txt")]) == 301


@pytest.mark.parametrize("store_url", ["directory"], indirect=True)
def test_an_import_leaves_out_what_no_host_can_have_and_names_it(shell: Shell) -> None:
    chat = os.fsencode(shell.data_dir / "uploads")
    for odd in (b"/a\xff", b"/chat/n\xff"):
        os.mkdir(chat + odd)
        Path(os.fsdecode(chat + odd + b"/x")).write_text("1")
    os.mkfifo(chat + b"/chat/pipe")
    (shell.data_dir / "uploads/stray").write_text("1")
    (shell.data_dir / "uploads/alias").symlink_to("chat")
    for name in ("new\nline", "README", "readme"):
        (shell.data_dir / "uploads/chat" / name).write_text(name)
    done = shell.inside("files", "import", "--json")
    assert done.code == 0, done.err
    assert (done.value["imported"], done.value["known"]) == (3, 0)
    assert set(done.value["left_out"]) == {
        "uploads/a\\udcff",
        "uploads/chat/'link'",
        "uploads/chat/'n\\udcff'",
        "uploads/chat/'n\\udcff/x'",
        "uploads/chat/'pipe'",
        "uploads/chat/'readme'",
    }
    assert shell.inside("files", "import").code == 0


async def test_a_name_that_is_no_text_does_not_keep_a_host_from_emptying_others(tmp_path: Path) -> None:
    parent = tmp_path / "uploads"
    parent.mkdir()
    os.mkdir(os.fsencode(parent) + b"/a\xff")
    async with Database(DatabaseSettings(), tmp_path) as database:
        store = DirectoryStore(tmp_path / "objects")
        files = HostFiles(database, store, root=tmp_path / "files", cache_bytes=1 << 20)
        assert await files.empty_unused("uploads", parent, unused=timedelta(0)) == 0


@pytest.mark.parametrize("store_url", ["directory"], indirect=True)
def test_damage_is_listed_with_the_files_that_need_it(shell: Shell, store_url: str) -> None:
    assert shell.inside("files", "import").code == 0
    (shell.data_dir / "uploads/chat/a.txt").write_text("x")
    for file in Path(store_url.removeprefix("file://")).rglob("*.*"):
        if file.is_file() and file.read_text() == "content of uploads/chat/a.txt":
            file.write_text("CONTENT of uploads/chat/a.txt")
    assert shell.inside("files", "fsck").code == 0  # its size is right
    found = shell.inside("files", "fsck", "--read")
    assert found.code == ExitCode.FAILED
    assert "uploads/chat/a.txt" in found.out and "sub/b.txt" not in found.out
    (damage,) = shell.inside("files", "fsck", "--read", "--repair", "--json").value["damages"]
    assert damage["files"] == ["uploads/chat/a.txt"]
    lost = shell.inside("files", "fsck", "--read")
    assert lost.code == ExitCode.FAILED and "it is lost" in lost.out and "uploads/chat/a.txt" in lost.out


def test_the_doctor_stores_and_reads_an_object(shell: Shell, store_url: str) -> None:
    files = checks_of(shell)["files"]
    assert files.startswith(f"ok: {store_url}, ") and "hosts share no disk" in files
    assert shell.inside("files", "fsck").code == 0


@pytest.mark.parametrize("store_url", ["moto"], indirect=True)
def test_the_doctor_names_what_is_wrong_and_no_secret(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    shell.environment["NEKRO_FILES__URL"] = "s3://no-such-bucket/p"
    done = shell.inside("doctor")
    assert "✗ files: cannot store object" in done.out and "NoSuchBucket" in done.out
    shell.environment["NEKRO_FILES__URL"] = "s3://key:hidden@bucket/p"
    done = shell.inside("doctor", "--settings")
    assert done.code == ExitCode.USAGE and "hidden" not in done.out + done.err
    assert "NEKRO_FILES__URL: the URL of files, s3://bucket/p, has more than a place" in done.err


@pytest.mark.parametrize("store_url", ["directory"], indirect=True)
def test_without_a_store_there_is_nothing_to_check(shell: Shell) -> None:
    del shell.environment["NEKRO_FILES__URL"]
    for action in ("fsck", "import"):
        done = shell.inside("files", action)
        assert done.code == ExitCode.USAGE and "NEKRO_FILES__URL names no store" in done.err
    assert "which all hosts of a fleet must share" in checks_of(shell)["files"]


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        (["list"], "name the chat"),
        (["fsck", "group_1"], "without a chat"),
        (["import", "--read"], "options of `nekro files fsck`"),
    ],
)
@pytest.mark.parametrize("store_url", ["directory"], indirect=True)
def test_arguments_that_do_not_fit_are_refused(shell: Shell, arguments: list[str], fault: str) -> None:
    done = shell.inside("files", *arguments)
    assert done.code == ExitCode.USAGE and fault in done.err
