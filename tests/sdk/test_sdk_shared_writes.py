"""Writes of plugins to ``/app/shared`` during a call: they arrive, and never through a planted link."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from nekro_agent.errors import InvalidValueError
from nekro_agent.files.file_system import FileSystem
from nekro_agent.files.staging import call_scope
from nekro_agent.methods import SandboxMethodType
from nekro_agent.plugin import NekroPlugin
from nekro_agent.schemas.agent_ctx import AgentCtx
from nekro_agent.testing import InMemoryRuntime
from nekro_agent.tools.path_convertor import convert_to_host_path

#: Maps a context and a sandbox path to a host path, in both generations of the file API.
GENERATIONS = {
    "fs": lambda ctx, path: ctx.fs.get_file(path),
    "path_convertor": lambda ctx, path: convert_to_host_path(
        Path(path), ctx.from_chat_key, container_key=ctx.container_key
    ),
}

Body = Callable[[AgentCtx, Callable[[str], Path]], Awaitable[Any]]


@pytest.fixture(params=list(GENERATIONS))
def run(
    request: pytest.FixtureRequest, world: InMemoryRuntime, plugin: NekroPlugin
) -> Callable[[Body], Awaitable[Any]]:
    """Run a body as a method."""

    async def run(body: Body) -> Any:
        plugin.reset_methods()

        @plugin.mount_sandbox_method(SandboxMethodType.TOOL, "body")
        async def method(ctx: AgentCtx) -> Any:
            return await body(ctx, lambda path: GENERATIONS[request.param](ctx, path))

        return (await world.call("method")).value

    return run


@pytest.fixture
def shared(world: InMemoryRuntime) -> Path:
    return world.context().fs.shared_path


def tree(root: Path) -> dict[str, str]:
    return {str(p.relative_to(root)): p.read_text() for p in root.rglob("*") if p.is_file()}


def written(path: Path) -> tuple[int, ...]:
    """What of a file's status a write changes; reading it may change the rest."""
    info = path.stat()
    return info.st_ino, info.st_size, info.st_mtime_ns, info.st_ctime_ns


async def test_created_changed_and_deleted_files_are_applied_to_the_area_at_the_end_of_the_call(
    run: Any, shared: Path
) -> None:
    for name in ("grown", "gone", "same"):
        (shared / name).write_text("before")
    untouched = written(shared / "same")

    async def body(ctx: AgentCtx, host: Callable[[str], Path]) -> None:
        host("/app/shared/new").write_text("new")
        with host("/app/shared/grown").open("a") as file:
            file.write(" and after")
        host("shared/gone").unlink()
        assert host("/app/shared/same").read_text() == "before"
        deep = host("/app/shared/a/b/deep")
        deep.parent.mkdir(parents=True, exist_ok=True)
        deep.write_text("deep")
        beside = host("/app/shared/same").with_suffix(".converted")
        beside.write_text("beside")
        assert host("/app/shared/new").read_text() == "new"  # it sees its own writes
        assert not any(host(f"/app/shared/{name}").is_relative_to(shared) for name in ("new", "same", "x"))

    await run(body)
    assert tree(shared) == {
        "new": "new",
        "grown": "before and after",
        "same": "before",
        "a/b/deep": "deep",
        "same.converted": "beside",
    }
    assert written(shared / "same") == untouched


async def test_a_directory_created_at_a_free_name_is_transferred_completely(run: Any, shared: Path) -> None:
    async def body(ctx: AgentCtx, host: Callable[[str], Path]) -> None:
        folder = host("/app/shared/report")
        (folder / "images").mkdir(parents=True)
        (folder / "index.html").write_text("index")
        (folder / "images" / "1.svg").write_text("one")

    await run(body)
    assert tree(shared / "report") == {"index.html": "index", "images/1.svg": "one"}


async def test_a_link_planted_meanwhile_is_replaced_and_its_target_unchanged(
    run: Any, shared: Path, tmp_path: Path
) -> None:
    victim = tmp_path / "victim"
    victim.write_text("before")

    async def body(ctx: AgentCtx, host: Callable[[str], Path]) -> None:
        path = host("/app/shared/out")
        (shared / "out").symlink_to(victim)  # as sandboxed code could do at this moment
        path.write_text("result")

    await run(body)
    assert victim.read_text() == "before"
    assert (shared / "out").read_text() == "result" and not (shared / "out").is_symlink()


async def test_a_link_in_the_path_of_a_file_fails_the_call(run: Any, shared: Path, tmp_path: Path) -> None:
    (shared / "folder").mkdir()

    async def body(ctx: AgentCtx, host: Callable[[str], Path]) -> None:
        host("/app/shared/folder/out").write_text("result")
        (shared / "folder").rmdir()
        (shared / "folder").symlink_to(tmp_path)

    with pytest.raises(InvalidValueError, match="'/app/shared/folder/out': 'folder' is refused"):
        await run(body)
    assert not (tmp_path / "out").exists()


async def test_a_directory_planted_at_the_name_fails_the_call(run: Any, shared: Path) -> None:
    async def body(ctx: AgentCtx, host: Callable[[str], Path]) -> None:
        host("/app/shared/out").write_text("result")
        (shared / "out").mkdir()

    with pytest.raises(InvalidValueError, match="cannot write '/app/shared/out': Is a directory"):
        await run(body)
    assert list(shared.rglob("*")) == [shared / "out"]


@pytest.mark.extended
async def test_a_race_with_sandboxed_code_writes_to_no_host_file(fs: FileSystem, tmp_path: Path) -> None:
    host = tmp_path / "host"
    host.mkdir()
    (host / "f").write_text("before")
    shared, stop = fs.shared_path, threading.Event()

    def plant() -> None:
        for number in itertools.cycle(range(2)):
            if stop.is_set():
                return
            with contextlib.suppress(OSError):
                os.symlink(host / "f", shared / "planted")
                os.replace(shared / "planted", shared / "f")
                os.unlink(shared / "f")
                (os.symlink(host, shared / "d") if number else (shared / "d").mkdir())
                (os.unlink if number else os.rmdir)(shared / "d")

    planter = threading.Thread(target=plant)
    planter.start()
    try:
        for _ in range(100):
            for path in ("/app/shared/f", "/app/shared/d/f"):
                with contextlib.suppress(ValueError):
                    async with call_scope("test"):
                        fs.get_file(path).write_text("after")
    finally:
        stop.set()
        planter.join()
    assert tree(host) == {"f": "before"}


async def test_a_file_can_be_forwarded_before_the_call_ends(
    run: Any, shared: Path, world: InMemoryRuntime
) -> None:
    async def body(ctx: AgentCtx, host: Callable[[str], Path]) -> list[str]:
        path = host("/app/shared/sub/out.txt")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("result")
        forwarded = [ctx.fs.forward_file(path), await ctx.fs.mixed_forward_file(path)]
        forwarded.append(await ctx.fs.mixed_forward_file("/app/shared/sub/out.txt"))
        assert tree(shared) == {"sub/out.txt": "result"}  # forwarding requires it there
        await ctx.send_file(str(path))
        path.write_text("result 2")
        await ctx.send_file("/app/shared/sub/out.txt")
        return forwarded

    assert await run(body) == ["/app/shared/sub/out.txt"] * 3
    assert tree(shared) == {"sub/out.txt": "result 2"}
    sent = [str(message.file_path) for message in world.messages.sent]
    assert sent == ["/app/uploads/out.txt", "/app/uploads/out-2.txt"]
    uploads = world.context().fs.upload_path
    assert [(uploads / Path(path).name).read_text() for path in sent] == ["result", "result 2"]


async def test_a_file_that_sandboxed_code_writes_meanwhile_is_visible(run: Any, shared: Path) -> None:
    async def body(ctx: AgentCtx, host: Callable[[str], Path]) -> list[str]:
        assert not host("/app/shared/answer").exists()
        (shared / "answer").write_text("42")
        seen = [host("/app/shared/answer").read_text()]
        (shared / "answer").write_text("43")
        return [*seen, host("/app/shared/answer").read_text()]

    assert await run(body) == ["42", "43"]


async def test_a_failed_call_transfers_its_files_and_a_cancelled_one_does_not(
    run: Any, shared: Path, world: InMemoryRuntime
) -> None:
    async def fails(ctx: AgentCtx, host: Callable[[str], Path]) -> None:
        host("/app/shared/log").write_text("what went wrong")
        raise RuntimeError("afterwards")

    with pytest.raises(RuntimeError, match="afterwards"):
        await run(fails)
    assert tree(shared) == {"log": "what went wrong"}
    writing = asyncio.Event()

    async def hangs(ctx: AgentCtx, host: Callable[[str], Path]) -> None:
        host("/app/shared/half").write_text("half of")
        writing.set()
        await asyncio.Event().wait()

    task = asyncio.create_task(run(hangs))
    await writing.wait()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert tree(shared) == {"log": "what went wrong"}
    assert list((world.runtime.data_dir / "staging").iterdir()) == []


async def test_directories_and_code_outside_of_calls_use_the_live_area(
    world: InMemoryRuntime, shared: Path
) -> None:
    (shared / "folder").mkdir()
    late: list[Path] = []

    async def body(ctx: AgentCtx) -> None:
        assert ctx.fs.get_file("/app/shared/folder") == shared / "folder"
        assert ctx.fs.get_file("/app/shared") == shared

        async def afterwards() -> None:
            await ended.wait()
            late.append(ctx.fs.get_file("/app/shared/late"))

        tasks.append(asyncio.create_task(afterwards()))

    ended, tasks = asyncio.Event(), list[asyncio.Task[None]]()
    plugin = world.plugins[0]
    plugin.mount_sandbox_method(SandboxMethodType.TOOL, "body")(body)
    await world.call("body")
    ended.set()
    await asyncio.gather(*tasks)
    assert late == [shared / "late"]


async def test_a_job_transfers_its_files_with_each_report(world: InMemoryRuntime, shared: Path) -> None:
    from nekro_agent.api.plugin import TaskCtl, task

    plugin, seen = world.plugins[0], list[dict[str, str]]()

    async def render(handle: Any) -> AsyncIterator[TaskCtl]:
        fs = (await AgentCtx.create_by_chat_key(handle.chat_key)).fs
        fs.get_file("/app/shared/frame").write_text("1")
        yield TaskCtl.report_progress("half", 50)
        seen.append(tree(shared))
        fs.get_file("/app/shared/frame").write_text("2!")
        yield TaskCtl.success("done")

    plugin.mount_async_task("render")(render)
    await task.start("render", "one", "test-chat", plugin)
    await world.jobs.settled()
    assert seen == [{"frame": "1"}]
    assert tree(shared) == {"frame": "2!"}


@pytest.mark.parametrize("path", ["/app/shared/../x", "/app/shared/a\0b", "/etc/passwd"])
async def test_paths_that_lead_elsewhere_are_refused_in_a_call_too(run: Any, path: str) -> None:
    async def body(ctx: AgentCtx, host: Callable[[str], Path]) -> None:
        host(path)

    with pytest.raises(ValueError):
        await run(body)
