"""``_ctx.fs`` and the files of messages: permitted and refused paths."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import itertools
import os
import threading
from pathlib import Path
from typing import Any

import pytest
from file_server import FileServer

from nekro_agent.errors import DownloadError, DownloadRefusedError, InvalidValueError
from nekro_agent.files import staging
from nekro_agent.files.file_system import FileSystem
from nekro_agent.files.staging import call_scope
from nekro_agent.methods import SandboxMethodType
from nekro_agent.plugin import NekroPlugin
from nekro_agent.schemas.agent_ctx import AgentCtx
from nekro_agent.testing import InMemoryRuntime


async def test_bytes_and_data_urls_are_written_to_the_uploads(fs: FileSystem) -> None:
    assert await fs.mixed_forward_file(b"abc", file_name="x.bin") == "/app/uploads/x.bin"
    assert (fs.upload_path / "x.bin").read_bytes() == b"abc"
    digest = hashlib.md5(b"abc").hexdigest()
    assert await fs.mixed_forward_file(b"abc") == f"/app/uploads/{digest}"
    url = "data:image/png;base64," + base64.b64encode(b"png").decode()
    path = await fs.mixed_forward_file(url)
    assert path.endswith(".png") and fs.get_file(path).read_bytes() == b"png"
    assert fs.get_file(await fs.mixed_forward_file("data:,a%20b")).read_text() == "a b"


async def test_a_name_cannot_lead_out_of_the_area(fs: FileSystem) -> None:
    assert await fs.mixed_forward_file(b"x", file_name="../../evil.txt") == "/app/uploads/evil.txt"
    assert (fs.upload_path / "evil.txt").is_file()


async def test_host_files_are_copied_to_the_shared_area_under_the_given_name(
    fs: FileSystem, tmp_path: Path
) -> None:
    source = tmp_path / "out.bin"
    source.write_bytes(b"1")
    assert await fs.mixed_forward_file(source) == "/app/shared/out.bin"
    assert await fs.mixed_forward_file(source, file_name="renamed.bin") == "/app/shared/renamed.bin"
    assert (fs.shared_path / "renamed.bin").read_bytes() == b"1"
    source.write_bytes(b"22")
    assert await fs.mixed_forward_file(source) == "/app/shared/out.bin"
    assert (fs.shared_path / "out.bin").read_bytes() == b"22"


async def test_files_inside_an_area_are_mapped_not_copied(fs: FileSystem) -> None:
    for area in ("uploads", "shared"):
        root = fs.upload_path if area == "uploads" else fs.shared_path
        (root / "sub").mkdir()
        (root / "sub" / "f").write_text("x")
        assert fs.forward_file(root / "sub" / "f") == f"/app/{area}/sub/f"
        assert await fs.mixed_forward_file(root / "sub" / "f") == f"/app/{area}/sub/f"
        assert await fs.mixed_forward_file(f"/app/{area}/sub/f") == f"/app/{area}/sub/f"
        assert await fs.mixed_forward_file(root / "sub" / "f", file_name="g") == "/app/shared/g"
    with pytest.raises(InvalidValueError, match="lies in neither area"):
        fs.forward_file("/etc/hostname")


SPELLINGS = (
    "chart.png", "./chart.png", "shared/chart.png", "./shared/chart.png", "/app/shared/chart.png",
    # What `os.path.abspath` makes of them in the sandbox, where `shared` and `uploads` are links.
    "/app/shared/shared/chart.png", "shared/shared/./chart.png",
)  # fmt: skip


@pytest.fixture
def linked(fs: FileSystem) -> FileSystem:
    """Areas with one file each, and the links that a sandbox makes."""
    (fs.shared_path / "shared").symlink_to("../../tmp/.shared/20")
    (fs.shared_path / "uploads").symlink_to("../uploads")
    (fs.shared_path / "chart.png").write_bytes(b"chart")
    (fs.upload_path / "in.csv").write_bytes(b"upload")
    return fs


@pytest.mark.parametrize("text", SPELLINGS)
async def test_a_shared_file_has_each_name_that_code_uses(
    linked: FileSystem, world: InMemoryRuntime, text: str
) -> None:
    assert linked.get_file(text).read_bytes() == b"chart"
    assert await linked.mixed_forward_file(text) == "/app/shared/chart.png"
    sent = await linked.bring_to_uploads(text)
    assert sent == "/app/uploads/chart.png" and linked.get_file(sent).read_bytes() == b"chart"
    async with call_scope("test", linked):
        with staging.opened(text) as file:
            assert file.read() == b"chart"


@pytest.mark.parametrize("text", ["uploads/in.csv", "/app/uploads/in.csv", "/app/shared/uploads/in.csv"])
async def test_an_upload_has_each_name_that_code_uses(linked: FileSystem, text: str) -> None:
    assert linked.get_file(text).read_bytes() == b"upload"
    assert await linked.mixed_forward_file(text) == "/app/uploads/in.csv"


async def test_a_link_named_like_an_area_leads_to_the_area_and_nowhere_else(
    fs: FileSystem, tmp_path: Path
) -> None:
    (tmp_path / "secret").write_text("secret")
    (fs.shared_path / "uploads").symlink_to(tmp_path)
    (fs.shared_path / "shared").symlink_to(tmp_path)
    for text in ("uploads/secret", "shared/secret", "/app/shared/uploads/secret", "shared/uploads/secret"):
        with pytest.raises(InvalidValueError):
            await fs.bring_to_uploads(text)
        assert not fs.get_file(text).exists()


async def test_a_directory_of_a_plugin_named_like_an_area_is_a_directory(fs: FileSystem) -> None:
    (fs.shared_path / "uploads").mkdir()
    (fs.shared_path / "uploads" / "own").write_text("own")
    assert fs.get_file("/app/shared/uploads/own").read_text() == "own"
    assert await fs.mixed_forward_file("/app/shared/uploads/own") == "/app/shared/uploads/own"


@pytest.mark.parametrize("text", ["../in.csv", "a/../../x", "shared/../uploads/in.csv", "x\0.png", "link"])
async def test_relative_names_are_checked_like_absolute_ones(linked: FileSystem, text: str) -> None:
    (linked.shared_path / "link").symlink_to("/etc/passwd")
    with pytest.raises(InvalidValueError):
        linked.get_file(text)
    with pytest.raises(InvalidValueError):
        await linked.bring_to_uploads(text)


@pytest.mark.parametrize(
    ("file", "error"),
    [
        ("/etc/passwd", InvalidValueError),
        ("/app/shared/none", InvalidValueError),
        ("../../etc/passwd", InvalidValueError),
        (Path("/nowhere/at/all"), InvalidValueError),
        ("data:image/png;base64,???", InvalidValueError),
        ("data:no comma", InvalidValueError),
        (42, TypeError),
        (None, TypeError),
    ],
)
async def test_unsupported_values_cannot_be_forwarded(
    fs: FileSystem, file: Any, error: type[Exception]
) -> None:
    with pytest.raises(error):
        await fs.mixed_forward_file(file)


async def test_files_of_the_system_and_of_other_chats_are_refused(
    fs: FileSystem, world: InMemoryRuntime, plugin: NekroPlugin
) -> None:
    data = world.runtime.data_dir
    data.mkdir(exist_ok=True)
    secret = data / "signing.key"
    secret.write_text("secret")
    other = world.areas.plugin_dir("Bob.other") / "f"
    other.write_text("theirs")
    other_chat = world.areas.uploads_dir("other-chat") / "f"
    other_chat.write_text("theirs")
    for path in (secret, other, other_chat):
        for spelling in (path, str(path)):
            with pytest.raises(InvalidValueError):
                await fs.mixed_forward_file(spelling)
    own = plugin.get_plugin_data_dir() / "mine.txt"
    own.write_text("mine")
    assert await fs.mixed_forward_file(str(own)) == "/app/shared/mine.txt"
    link = plugin.get_plugin_data_dir() / "link"
    link.symlink_to(secret)
    with pytest.raises(InvalidValueError):
        await fs.mixed_forward_file(link)


def test_a_shared_file_is_read_through_a_private_copy(fs: FileSystem) -> None:
    (fs.shared_path / "in.txt").write_text("content")
    copy = fs.get_file("/app/shared/in.txt")
    assert copy.name == "in.txt" and copy.read_text() == "content"
    assert not copy.is_relative_to(fs.shared_path)
    (fs.shared_path / "in.txt").unlink()
    (fs.shared_path / "in.txt").symlink_to("/etc/passwd")
    assert copy.read_text() == "content"
    with pytest.raises(ValueError, match="link"):
        fs.get_file("/app/shared/in.txt")


def test_planted_special_files_in_the_shared_area_are_refused(fs: FileSystem, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("secret")
    (fs.shared_path / "out").symlink_to(tmp_path)
    os.link(secret, fs.shared_path / "hard")
    for name in ("out/secret", "hard"):
        with pytest.raises(ValueError):
            fs.get_file(f"/app/shared/{name}")
    os.mkfifo(fs.shared_path / "fifo")
    assert not fs.get_file("shared/fifo").is_file()
    target = fs.get_file("/app/shared/new/out.txt")
    assert target == fs.shared_path / "new/out.txt"


async def test_a_delivery_replaces_a_planted_link_not_its_target(fs: FileSystem, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("before")
    (fs.shared_path / "out.txt").symlink_to(victim)
    source = tmp_path / "out.txt"
    source.write_text("new")
    await fs.mixed_forward_file(source)
    assert victim.read_text() == "before"
    assert (fs.shared_path / "out.txt").read_text() == "new"
    assert sorted(path.name for path in fs.shared_path.iterdir()) == ["out.txt"]


async def test_private_copies_are_deleted_with_the_call(world: InMemoryRuntime, plugin: NekroPlugin) -> None:
    seen: list[Path] = []

    @plugin.mount_sandbox_method(SandboxMethodType.TOOL, "read")
    async def read(ctx: AgentCtx) -> str:
        seen.append(ctx.fs.get_file("/app/shared/in.txt"))
        return seen[0].read_text()

    (world.context().fs.shared_path / "in.txt").write_text("content")
    assert (await world.call("read")).value == "content"
    assert not seen[0].exists()
    assert list((world.runtime.data_dir / "staging").iterdir()) == []


async def test_urls_are_downloaded_to_the_uploads(fs: FileSystem, file_server: FileServer) -> None:
    url = file_server.add("/cat.png", b"cat", content_type="image/png")
    path = await fs.mixed_forward_file(url)
    assert path.startswith("/app/uploads/") and path.endswith(".png")
    assert fs.get_file(path).read_bytes() == b"cat"
    assert await fs.mixed_forward_file(url, file_name="../my cat.png") == "/app/uploads/my cat.png"
    plain = file_server.add("/picture", b"cat", content_type="image/gif; x=y")
    assert (await fs.mixed_forward_file(plain)).endswith(".gif")
    with pytest.raises(DownloadError, match="answered 404"):
        await fs.mixed_forward_file(file_server.base + "/none")
    assert not [p for p in fs.upload_path.iterdir() if p.name.startswith(".")]


async def test_messages_carry_files_of_the_chat_and_of_the_plugin(
    world: InMemoryRuntime, plugin: NekroPlugin, file_server: FileServer
) -> None:
    ctx = world.context(plugin_key=plugin.key)
    report = plugin.get_plugin_data_dir() / "reports" / "r.txt"
    report.parent.mkdir()
    report.write_text("text")
    await ctx.ms.send_file(ctx.chat_key, str(report), ctx, filename="报告.txt")
    (ctx.fs.shared_path / "p.png").write_bytes(b"p")
    await ctx.send_image("/app/shared/p.png")
    await ctx.send_file(file_server.add("/doc.pdf", b"pdf"))
    await ctx.ms.send_file(ctx.chat_key, Path("/app/uploads/p.png"), ctx, file_name="shown.png")
    sent = [(m.file_path, m.file_name, m.file_kind, m.plugin_key) for m in world.messages.sent]
    assert sent[0] == ("/app/uploads/报告.txt", "报告.txt", "file", "Ada.sample")
    assert sent[1] == ("/app/uploads/p.png", "p.png", "image", "Ada.sample")
    assert sent[2][0] is not None and sent[2][0].endswith(".pdf")
    assert sent[3][:2] == ("/app/uploads/p.png", "shown.png")
    assert ctx.fs.get_file("/app/uploads/报告.txt").read_text() == "text"
    assert await ctx.ms.download_from_url(file_server.base + "/doc.pdf", ctx) == sent[2][0]


@pytest.mark.parametrize("path", ["/etc/passwd", "/app/shared/none.png", "/app/shared", "", "../x", 7])
async def test_a_file_that_must_not_be_sent_is_an_error(world: InMemoryRuntime, path: Any) -> None:
    ctx = world.context()
    with pytest.raises(InvalidValueError):
        await ctx.ms.send_file(ctx.chat_key, path, ctx)
    assert world.messages.sent == []


async def test_invalid_messages_are_refused(world: InMemoryRuntime) -> None:
    ctx = world.context()
    with pytest.raises(InvalidValueError, match="message must be a string, not int"):
        await ctx.send_text(3)  # type: ignore[arg-type]
    with pytest.raises(InvalidValueError, match="is not a chat key"):
        await ctx.ms.send_text("", "x", ctx)


async def test_private_addresses_are_refused_unless_allowed(
    plugin: NekroPlugin, file_server: FileServer
) -> None:
    url = file_server.add("/x", b"x")
    async with InMemoryRuntime(plugin) as world:
        with pytest.raises(DownloadRefusedError, match=r"127\.0\.0\.1.*NEKRO_DOWNLOADS__ALLOW_PRIVATE"):
            await world.context().fs.mixed_forward_file(url)
    assert file_server.requests == []


@pytest.mark.extended
async def test_a_race_with_sandboxed_code_leaks_nothing(fs: FileSystem, tmp_path: Path) -> None:
    """A file and a directory are continuously exchanged for links while they are read."""
    (tmp_path / "host").mkdir()
    (tmp_path / "host" / "f").write_text("host secret")
    shared, stop = fs.shared_path, threading.Event()

    def exchange() -> None:
        for number in itertools.cycle(range(2)):
            if stop.is_set():
                return
            with contextlib.suppress(OSError):
                (shared / "new").unlink(missing_ok=True)
                if number:
                    (shared / "new").symlink_to(tmp_path / "host" / "f")
                else:
                    (shared / "new").write_text("own")
                os.replace(shared / "new", shared / "f")
                os.rename(shared / "d", shared / "real")
                os.symlink(tmp_path / "host", shared / "d")
                os.unlink(shared / "d")
                os.rename(shared / "real", shared / "d")

    (shared / "d").mkdir()
    (shared / "d" / "f").write_text("own")
    writer = threading.Thread(target=exchange)
    writer.start()
    contents: set[str] = set()
    try:
        for _ in range(700):
            for path in ("/app/shared/f", "/app/shared/d/f"):
                with contextlib.suppress(ValueError, FileNotFoundError):
                    async with call_scope("test"):
                        contents.add(fs.get_file(path).read_text())
    finally:
        stop.set()
        writer.join()
    assert "own" in contents and "host secret" not in contents


@pytest.mark.parametrize(
    "text", ["x" * 300, "y" * 100_000, "a sentence\nof two lines", "/" * 5000, "a/" * 3000, "\ud800.png"]
)
async def test_a_text_that_is_no_path_names_no_file(linked: FileSystem, text: str) -> None:
    with pytest.raises(InvalidValueError):
        await linked.bring_to_uploads(text)
    with pytest.raises(InvalidValueError):
        await linked.mixed_forward_file(text)
