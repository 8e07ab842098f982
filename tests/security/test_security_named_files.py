"""A path in text, possibly written by a model, refers only to files of its own call."""

from __future__ import annotations

import asyncio
import os
import subprocess
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from nekro_agent.errors import InvalidValueError
from nekro_agent.files import safe_files
from nekro_agent.methods import SandboxMethodType
from nekro_agent.plugin import NekroPlugin
from nekro_agent.schemas.agent_ctx import AgentCtx
from nekro_agent.services.agent.creator import ContentSegment
from nekro_agent.testing import InMemoryRuntime
from nekro_agent.tools.common_util import copy_to_upload_dir, download_file, download_file_from_bytes

SECRET = b"\x89PNG\r\n\x1a\n of another service"
CHAT = "test-chat"


async def _as_image(ctx: AgentCtx, path: str) -> object:
    return ContentSegment.image_content_from_path(path)


#: Every API by which a path in text leads to the file's content.
READERS: dict[str, Callable[[AgentCtx, str], Awaitable[object]]] = {
    "send_file": lambda ctx, path: ctx.ms.send_file(ctx.chat_key, path, ctx),
    "send_file_path": lambda ctx, path: ctx.ms.send_file(ctx.chat_key, Path(path), ctx),
    "send_image": lambda ctx, path: ctx.send_image(path),
    "bring_to_uploads": lambda ctx, path: ctx.fs.bring_to_uploads(path, "out"),
    "mixed_forward_file": lambda ctx, path: ctx.fs.mixed_forward_file(path, "out"),
    "image_content_from_path": _as_image,
    "copy_to_upload_dir": lambda ctx, path: copy_to_upload_dir(path, from_chat_key=ctx.chat_key),
}


class Lab:
    """A plugin whose one method runs the test's code, served by a runtime."""

    def __init__(self, world: InMemoryRuntime, plugin: NekroPlugin, tmp_path: Path) -> None:
        self.world = world
        self.plugin = plugin
        self.etc = tmp_path / "etc"
        self.etc.mkdir()
        self.secret = self.etc / "secret.png"
        self.secret.write_bytes(SECRET)

    async def call(self, work: Callable[[AgentCtx], Awaitable[Any]], *, chat_key: str = CHAT) -> Any:
        """Run ``work`` as a method call."""
        self.work = work
        return (await self.world.call("do", chat_key=chat_key)).value

    def delivered(self) -> list[bytes]:
        """Contents of every file in the chat's areas."""
        files = self.world.context().fs
        return [
            path.read_bytes()
            for area in (files.shared_path, files.upload_path)
            for path in area.rglob("*")
            if path.is_file() and not path.is_symlink()
        ]


@pytest.fixture
def host_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A temporary directory of the host that does not contain the data directory."""
    directory = tmp_path / "tmp"
    directory.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(directory))
    return directory


@pytest.fixture
async def lab(tmp_path: Path, host_tmp: Path) -> Any:
    plugin = NekroPlugin("sample", "sample", "", "1", "Ada", "")
    async with InMemoryRuntime(plugin, data_dir=tmp_path / "data") as world:
        made = Lab(world, plugin, tmp_path)

        @plugin.mount_sandbox_method(SandboxMethodType.TOOL, "do")
        async def do(ctx: AgentCtx) -> Any:
            return await made.work(ctx)

        yield made


@pytest.fixture(params=sorted(READERS))
def read(request: pytest.FixtureRequest) -> Callable[[AgentCtx, str], Awaitable[object]]:
    return READERS[request.param]


async def refused(lab: Lab, read: Callable[..., Awaitable[object]], *paths: str) -> None:
    for path in paths:
        with pytest.raises(InvalidValueError):
            await lab.call(lambda ctx, path=path: read(ctx, path))
        assert SECRET not in lab.delivered()


async def test_files_of_other_services_in_the_temporary_directory_are_refused(
    lab: Lab, host_tmp: Path, read: Any
) -> None:
    other = host_tmp / "service.png"
    other.write_bytes(SECRET)
    other.chmod(0o600)
    await refused(lab, read, str(other), f"{host_tmp}/./service.png", f"{host_tmp}/../tmp/service.png")


async def test_staging_of_another_call_is_refused(lab: Lab, read: Any) -> None:
    staging = lab.world.runtime.data_dir / "staging" / "tmpother"
    staging.mkdir(parents=True)
    (staging / "note.png").write_bytes(SECRET)
    await refused(lab, read, str(staging / "note.png"))


async def test_a_temporary_file_of_the_call_itself_is_read(lab: Lab, read: Any) -> None:
    async def by_name(ctx: AgentCtx) -> None:
        with tempfile.NamedTemporaryFile(suffix=".png") as file:
            file.write(SECRET)
            file.flush()
            await read(ctx, file.name)

    async def by_directory(ctx: AgentCtx) -> None:
        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory, "deep", "plot.png")
            path.parent.mkdir()
            path.write_bytes(SECRET)
            await read(ctx, str(path))

    def blocking() -> str:
        descriptor, name = tempfile.mkstemp(suffix=".png")
        os.write(descriptor, SECRET)
        os.close(descriptor)
        return name

    async def by_thread(ctx: AgentCtx) -> None:
        await read(ctx, await asyncio.to_thread(blocking))

    for work in (by_name, by_directory, by_thread):
        await lab.call(work)


async def test_a_temporary_file_of_a_concurrent_call_is_refused(lab: Lab, read: Any) -> None:
    """Same process, same plugin, same user, created after this call started."""
    made: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    over = asyncio.Event()

    async def victim(ctx: AgentCtx) -> None:
        with tempfile.NamedTemporaryFile(suffix=".png") as file:
            file.write(SECRET)
            file.flush()
            made.set_result(file.name)
            await over.wait()

    running = asyncio.create_task(lab.call(victim, chat_key="victim"))
    try:
        await refused(lab, read, await made)
    finally:
        over.set()
        await running


async def test_a_background_task_of_the_call_sends_its_own_temporary_file(lab: Lab) -> None:
    ended = asyncio.Event()
    tasks: list[asyncio.Task[None]] = []

    async def later(ctx: AgentCtx) -> None:
        await ended.wait()
        with tempfile.NamedTemporaryFile(suffix=".txt") as file:
            await ctx.send_file(file.name)

    async def work(ctx: AgentCtx) -> None:
        tasks.append(asyncio.create_task(later(ctx)))

    await lab.call(work)
    ended.set()
    await tasks[0]
    assert len(lab.world.messages.sent) == 1


@pytest.mark.parametrize("deliver", ["bring_to_uploads", "mixed_forward_file"])
@pytest.mark.parametrize("kind", ["symbolic", "hard"])
async def test_a_temporary_file_replaced_by_a_link_before_it_is_opened_is_refused(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, deliver: str, kind: str
) -> None:
    open_file = safe_files.open_file

    async def work(ctx: AgentCtx) -> None:
        descriptor, name = tempfile.mkstemp()
        os.close(descriptor)

        def swapped(*args: Any) -> Any:
            os.unlink(name)
            (os.symlink if kind == "symbolic" else os.link)(lab.secret, name)
            return open_file(*args)

        monkeypatch.setattr(safe_files, "open_file", swapped)
        await READERS[deliver](ctx, name)

    with pytest.raises(InvalidValueError):
        await lab.call(work)
    assert SECRET not in lab.delivered()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
async def test_a_temporary_file_of_another_user_with_the_calls_name_is_refused(lab: Lab) -> None:
    async def work(ctx: AgentCtx) -> None:
        descriptor, name = tempfile.mkstemp()
        os.close(descriptor)
        os.chown(name, 65534, 65534)
        await ctx.send_file(name)

    with pytest.raises(InvalidValueError, match="belongs to another user"):
        await lab.call(work)


async def test_a_link_out_of_the_calls_temporary_directory_is_refused(lab: Lab, read: Any) -> None:
    async def work(ctx: AgentCtx) -> None:
        directory = tempfile.mkdtemp()
        os.symlink(lab.secret, f"{directory}/link.png")
        await read(ctx, f"{directory}/link.png")

    with pytest.raises(InvalidValueError):
        await lab.call(work)


@pytest.fixture
def descriptor(lab: Lab) -> Iterator[int]:
    fd = os.open(lab.secret, os.O_RDONLY)
    yield fd
    os.close(fd)


@pytest.fixture
def neighbour() -> Iterator[int]:
    """A process with the host's root and working directory, as seen by ``/proc``."""
    process = subprocess.Popen(["sleep", "600"])
    yield process.pid
    process.kill()
    process.wait()


async def test_kernel_resolved_spellings_are_refused(
    lab: Lab, read: Any, descriptor: int, neighbour: int
) -> None:
    loop = lab.etc / "loop"
    loop.symlink_to(loop)
    spellings = [
        f"/proc/self/fd/{descriptor}",
        f"/dev/fd/{descriptor}",
        f"/proc/{os.getpid()}/task/{os.getpid()}/fd/{descriptor}",
        f"/proc/self/root{lab.secret}",
        f"/proc/{neighbour}/root{lab.secret}",
        f"/proc/{neighbour}/environ",
        str(lab.secret),
        f"{lab.secret}\0.png",
        f"{lab.secret}\n",
        str(loop),
        "/" + "x" * 255,
        "/" + "x" * 256,
        "/x" * 3000,
        "\ud800",
        "",
    ]
    await refused(lab, read, *spellings)


async def test_names_of_255_bytes_are_sent(lab: Lab) -> None:
    name = "ä" * 125 + "x.png"
    assert len(name.encode()) == 255

    async def work(ctx: AgentCtx) -> str:
        path = lab.plugin.get_plugin_data_dir() / name
        path.write_bytes(b"mine")
        return await ctx.fs.bring_to_uploads(str(path))

    assert await lab.call(work) == f"/app/uploads/{name}"


async def test_a_path_in_text_cannot_name_an_outside_place_to_write_to(lab: Lab, host_tmp: Path) -> None:
    outside = [str(lab.etc / "cron"), str(host_tmp / "x"), f"{lab.world.runtime.data_dir}/configs/a.yaml"]
    for target in outside:
        for work in (
            lambda ctx, target=target: download_file_from_bytes(b"x", target),
            lambda ctx, target=target: download_file("http://127.0.0.1:9/x", target, retry_count=0),
        ):
            with pytest.raises(InvalidValueError, match="no directory of this chat or plugin"):
                await lab.call(work)
        assert not Path(target).exists()

    async def inside(ctx: AgentCtx) -> None:
        await download_file_from_bytes(b"x", str(lab.plugin.get_plugin_data_dir() / "d" / "x"))
        await download_file_from_bytes(b"x", str(ctx.fs.get_file("/app/shared/x")))
        await download_file_from_bytes(b"x", tempfile.mkdtemp() + "/x")
        await download_file_from_bytes(b"x", lab.etc / "on purpose")

    await lab.call(inside)
    assert lab.delivered() == [b"x"]
