"""Long work: jobs that wake the agent, jobs that wait for a word or fail, and a method that takes a while."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator

from nekro_agent.api.plugin import AsyncTaskHandle, NekroPlugin, SandboxMethodType, TaskCtl, task
from nekro_agent.api.schemas import AgentCtx
from nekro_agent.models.db_chat_channel import DBChatChannel
from nekro_agent.services.command.base import CommandPermission
from nekro_agent.services.command.ctl import CmdCtl
from nekro_agent.services.command.schemas import CommandExecutionContext, CommandResponse

plugin = NekroPlugin(
    name="Works",
    module_name="works",
    description="Reports, imports, backups and builds that take a while.",
    version="1.0.0",
    author="eval",
    url="",
)

_STEPS = 3
_STEP_SECONDS = 0.1
_POLL_SECONDS = 0.05


@plugin.mount_async_task("report")
async def _write_report(handle: AsyncTaskHandle, topic: str) -> AsyncIterator[TaskCtl]:
    for step in range(_STEPS):
        await asyncio.sleep(_STEP_SECONDS)
        yield TaskCtl.report_progress(f"step {step + 1}", 100 * (step + 1) / _STEPS)
    result = f"The report on {topic} is finished: {len(topic) * 7} pages."
    await handle.notify_agent(result)
    yield TaskCtl.success(result)


@plugin.mount_async_task("import")
async def _run_import(handle: AsyncTaskHandle, name: str) -> AsyncIterator[TaskCtl]:
    yield TaskCtl.report_progress("waits for confirmation", 10)
    rows = await handle.wait("confirmed")
    result = f"The import {name} is finished: {rows} rows."
    await handle.notify_agent(result)
    yield TaskCtl.success(result)


@plugin.mount_async_task("backup")
async def _run_backup(handle: AsyncTaskHandle, volume: str) -> AsyncIterator[TaskCtl]:
    yield TaskCtl.report_progress("copies", 20)
    await asyncio.sleep(_STEP_SECONDS)
    if volume == "attic":
        yield TaskCtl.fail("the volume attic is full")
        return
    result = f"The backup of {volume} is finished."
    await handle.notify_agent(result)
    yield TaskCtl.success(result)


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "Start a report", "Start a report.")
async def start_report(_ctx: AgentCtx, topic: str) -> str:
    """Start a report as a job; when it is finished, a notice with its pages wakes the agent.

    Args:
        topic (str): One word.
    """
    return await _start(_ctx, "report", topic)


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "Start an import", "Start an import.")
async def start_import(_ctx: AgentCtx, name: str) -> str:
    """Start an import as a job; it waits for `confirm_import`, and a notice of its end wakes the agent.

    Args:
        name (str): One word.
    """
    return await _start(_ctx, "import", name)


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "Confirm an import", "Let an import go on.")
async def confirm_import(_ctx: AgentCtx, name: str, rows: int) -> bool:
    """Let an import go on.

    Args:
        name (str): As it was started.
        rows (int): How many rows to import.
    """
    handle = task.get_handle("import", f"{_ctx.chat_key}:{name}")
    if handle is None:
        raise ValueError(f"no import {name!r} waits")
    return handle.notify("confirmed", rows)


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "Start a backup", "Start a backup.")
async def start_backup(_ctx: AgentCtx, volume: str) -> str:
    """Start a backup as a job; a notice of its end or failure wakes the agent.

    Args:
        volume (str): Name of the volume.
    """
    return await _start(_ctx, "backup", volume)


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "Wait for a job", "Wait until a job has ended.")
async def wait_for_job(_ctx: AgentCtx, kind: str, name: str) -> str:
    """Wait until a job has ended and return how; for callers that no notice wakes.

    Args:
        kind (str): report, import or backup.
        name (str): As it was started.
    """
    while True:
        state = task.get_state(kind, f"{_ctx.chat_key}:{name}")
        if state is None:
            raise ValueError(f"there is no {kind} {name!r}")
        if state.is_terminal:
            return f"{state.signal.value}: {state.message}"
        await asyncio.sleep(_POLL_SECONDS)


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "Build", "Build a part of a product.", lane="long")
async def build(_ctx: AgentCtx, part: str, of: str = "") -> str:
    """Build a part, perhaps of the part before; takes a while and returns its mark.

    Args:
        part (str): Name of the part.
        of (str): Mark of the part that it needs; "" needs none.
    """
    await asyncio.sleep(_STEP_SECONDS)
    return f"{part}-{hashlib.sha256(f'{part}/{of}'.encode()).hexdigest()[:8]}"


@plugin.mount_command(
    name="eval_silence", description="The agent of this chat is silent", permission=CommandPermission.PUBLIC
)
async def silence(context: CommandExecutionContext) -> CommandResponse:
    """Keep notices from waking the agent of this chat: tool calling takes place in it."""
    channel = await DBChatChannel.get_channel(chat_key=context.chat_key)
    await channel.set_channel_status("observe")
    return CmdCtl.success("silent")


async def _start(ctx: AgentCtx, kind: str, name: str) -> str:
    await task.start(kind, f"{ctx.chat_key}:{name}", ctx.chat_key, plugin, name)
    return f"The {kind} {name} is started."
