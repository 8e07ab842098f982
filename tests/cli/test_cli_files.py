"""`nekro files` on real areas of a chat, as the workers of the data directory see them."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from nekro_shell import Shell, open_shell

from broker_config.embedded import resolve_settings
from broker_config.settings import DatabaseSettings, Settings
from nekro.app.services import Services
from nekro.cli.running import ExitCode
from nekro_agent.ports import ChatInfo
from storage.engine import Database


@pytest.fixture(scope="module", params=["sqlite", "postgres"])
def shell(request: pytest.FixtureRequest) -> Iterator[Shell]:
    with open_shell({}) as shell:
        url = f"sqlite:///{shell.directory}/own.db"
        if request.param == "postgres":
            url = request.getfixturevalue("postgres_server").create_database()
        shell.environment["NEKRO_DATABASE__URL"] = url
        shell.environment["NEKRO_UPLOADS__CHAT_BYTES"] = str(1 << 20)
        shell.environment["NEKRO_SANDBOX__SHARED_BYTES"] = str(1 << 20)
        assert shell.inside("db", "upgrade").code == 0
        yield shell


def chat_of(shell: Shell, key: str) -> ChatInfo:
    async def ensure() -> ChatInfo:
        url = shell.environment["NEKRO_DATABASE__URL"]
        database = Database(DatabaseSettings(url=url), shell.data_dir)
        async with database.begin() as transaction:
            chat = await transaction.chats.ensure(key)
        await database.dispose()
        return chat

    return asyncio.run(ensure())


def areas_of(shell: Shell, key: str) -> tuple[Path, Path]:
    """The directories of uploads and shared files that a worker uses."""
    chat = chat_of(shell, key)
    database = {"url": shell.environment["NEKRO_DATABASE__URL"]}
    settings = Settings.load(env_file=None, data_dir=shell.data_dir, database=database)
    services = Services.load(resolve_settings(settings), role="cli")
    try:
        return services.areas.uploads_dir(key), services.areas.shared_dir(chat.container_key)
    finally:
        services.upload_areas.dispose()


def test_a_file_that_is_put_is_where_the_workers_read_it(shell: Shell) -> None:
    uploads, shared = areas_of(shell, "put")
    (shell.directory / "report.txt").write_text("figures", "utf-8")
    done = shell.inside("files", "put", "put", "report.txt", "--json")
    assert (done.code, done.value) == (0, {"path": "/app/uploads/report.txt", "size_bytes": 7})
    assert (uploads / "report.txt").read_text() == "figures"
    for target in ("/app/shared/in/data.txt", "shared/in/", "shared"):
        assert shell.inside("files", "put", "put", "report.txt", target).code == 0
    assert (shared / "in" / "data.txt").read_text() == "figures"
    assert (shared / "in" / "report.txt").read_text() == (shared / "report.txt").read_text() == "figures"
    assert shell.inside("files", "put", "put", "report.txt", "named.txt").code == 0
    assert (shared / "named.txt").read_text() == "figures"
    listed = shell.inside("files", "list", "put", "in", "--json").value
    assert listed == shell.inside("files", "list", "put", "/app/shared/in", "--json").value
    assert [file["path"] for file in listed] == ["/app/shared/in/data.txt", "/app/shared/in/report.txt"]
    everything = shell.inside("files", "list", "put").out
    assert "/app/uploads/report.txt" in everything and "/app/shared/report.txt" in everything


def test_a_file_is_copied_here_and_overwrites_nothing(shell: Shell) -> None:
    _, shared = areas_of(shell, "get")
    (shared / "chart.bin").write_bytes(bytes(range(256)))
    done = shell.inside("files", "get", "get", "/app/shared/chart.bin", "--json")
    assert done.value == {"path": "/app/shared/chart.bin", "size_bytes": 256, "file": "chart.bin"}
    assert (shell.directory / "chart.bin").read_bytes() == bytes(range(256))
    again = shell.inside("files", "get", "get", "/app/shared/chart.bin")
    assert (again.code, "chart.bin exists" in again.err) == (ExitCode.USAGE, True)
    (shell.directory / "folder").mkdir(exist_ok=True)
    assert shell.inside("files", "get", "get", "chart.bin", "folder").code == 0
    assert (shell.directory / "folder" / "chart.bin").stat().st_size == 256
    (shared / "notes.txt").write_text("こんにちは", "utf-8")
    assert shell("files", "get", "get", "shared/notes.txt", "-").out == "こんにちは"


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/app/shared/../../secret", "'..'"),
        ("/etc/passwd", "neither /app/uploads nor /app/shared"),
        ("shared/link", "link"),
        ("shared/linked/secret", "link"),
        ("shared/twice", "more than one name"),
        ("shared/pipe", "ordinary file"),
        ("shared/folder", "ordinary file"),
    ],
)
def test_a_path_that_leaves_the_area_is_refused(shell: Shell, path: str, words: str) -> None:
    _, shared = areas_of(shell, "hostile")
    secret = shell.directory / "secret"
    secret.write_text("s3cret", "utf-8")
    if not (shared / "link").is_symlink():
        (shared / "link").symlink_to(secret)
        (shared / "linked").symlink_to(shell.directory)
        (shared / "once").write_text("x", "utf-8")
        os.link(shared / "once", shared / "twice")
        os.mkfifo(shared / "pipe")
        (shared / "folder").mkdir()
    done = shell.inside("files", "get", "hostile", path, "out", "--json")
    assert done.code == ExitCode.USAGE, done.err
    assert words in done.value["error"]["message"]
    assert not (shell.directory / "out").exists()
    assert "s3cret" not in done.out + done.err


@pytest.mark.parametrize("path", ["/etc", "../etc", "/app/other"])
def test_a_list_of_another_directory_is_refused(shell: Shell, path: str) -> None:
    areas_of(shell, "hostile")
    done = shell.inside("files", "list", "hostile", path)
    assert (done.code, done.out) == (ExitCode.USAGE, "")
    assert f"{path} lies in neither /app/uploads nor /app/shared" in done.err


def test_nothing_is_written_through_a_link(shell: Shell) -> None:
    _, shared = areas_of(shell, "writes")
    outside = shell.directory / "outside"
    outside.mkdir(exist_ok=True)
    (shared / "linked").symlink_to(outside)
    (shared / "name").symlink_to(outside / "name")
    (shell.directory / "mine.txt").write_text("mine", "utf-8")
    refused = shell.inside("files", "put", "writes", "mine.txt", "shared/linked/mine.txt")
    assert refused.code == ExitCode.USAGE
    assert shell.inside("files", "put", "writes", "mine.txt", "shared/name").code == 0
    assert list(outside.iterdir()) == []
    assert (shared / "name").read_text() == "mine"


def test_the_limits_of_both_areas_hold(shell: Shell) -> None:
    chat_of(shell, "limits")
    (shell.directory / "large").write_bytes(b"x" * (2 << 20))
    for target, setting in (("uploads/large", "UPLOADS__CHAT_BYTES"), ("shared/large", "SHARED_BYTES")):
        done = shell.inside("files", "put", "limits", "large", target)
        assert (done.code, setting in done.err) == (ExitCode.USAGE, True), done.err
    assert shell.inside("files", "list", "limits", "--json").value == []


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["get", "known", "shared/missing"], ExitCode.STORAGE, "`nekro files list` lists"),
        (["list", "unknown"], ExitCode.STORAGE, "there is no chat 'unknown'"),
        (["put", "known", "missing.txt"], ExitCode.USAGE, "missing.txt does not exist"),
        (["put", "known", "plugins"], ExitCode.USAGE, "plugins is not an ordinary file"),
        (["put", "known", "own.txt", "uploads/a/b"], ExitCode.USAGE, "the uploads have no folders"),
        (["get", "known", "shared/x", "-", "--json"], ExitCode.USAGE, "cannot go to stdout"),
    ],
)
def test_a_refused_command_names_the_reason_and_has_its_exit_code(
    shell: Shell, arguments: list[str], code: int, words: str
) -> None:
    chat_of(shell, "known")
    (shell.directory / "own.txt").write_text("x", "utf-8")
    done = shell.inside("files", *arguments)
    assert (done.code, words in done.err) == (code, True), done.err
