"""Results of a plugin author's strict type checker for the public API."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.extended

GOOD = """
from typing import Annotated, Any

from nekro_agent.api import core, message, recurring_timer, timer
from nekro_agent.api.plugin import (
    Arg, AsyncTaskHandle, CmdCtl, CommandExecutionContext, CommandResponse, ConfigBase, NekroPlugin,
    SandboxMethodType, TaskCtl, long_running, task,
)
from nekro_agent.api.schemas import AgentCtx, ChatMessage
from nekro_agent.api.signal import MsgSignal
from nekro_agent.testing import InMemoryRuntime
from nekro_agent.downloads.download import fetch

plugin = NekroPlugin(name="n", module_name="m", description="d", version="1", author="a", url="u")


@plugin.mount_config()
class Config(ConfigBase):
    LIMIT: int = 1


config: Config = plugin.get_config(Config)


@long_running
@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "x", lane="long")
async def method(ctx: AgentCtx, city: str) -> dict[str, Any]:
    text: str | None = await plugin.store.get(user_key=ctx.from_user_id, store_key=city)
    await message.send_text(ctx.chat_key, text or "", ctx)
    path: str = await ctx.fs.mixed_forward_file(b"x", file_name="x")
    core.logger.success(f"{path} {config.LIMIT}")
    result = await fetch("https://x", plugin.get_plugin_data_dir() / "f")
    return {"size": result.size_bytes}


@plugin.mount_on_user_message()
async def on_message(ctx: AgentCtx, incoming: ChatMessage) -> MsgSignal | None:
    await timer.set_timer(ctx.chat_key, 1, "x")
    job = await recurring_timer.create_cron_job(ctx.chat_key, "* * * * *", "x", "UTC")
    return MsgSignal.CONTINUE if job.title else None


@plugin.mount_command(name="c", description="")
async def command(
    context: CommandExecutionContext,
    a: Annotated[str, Arg("a", positional=True)],
    b: int = Arg("b", default=1),
) -> CommandResponse:
    return CmdCtl.success(a * b)


@plugin.mount_async_task("t")
async def job(handle: AsyncTaskHandle, n: int) -> TaskCtl:
    await handle.notify_agent("x")
    return TaskCtl.success(data=n)


async def main(ctx: AgentCtx) -> None:
    handle = await task.start("t", "1", ctx.chat_key, plugin, 3)
    handle.notify("k", 1)
    answer: dict[str, Any] = await method(ctx, "x")  # the decorators keep the signature
    async with InMemoryRuntime(plugin) as world:
        print((await world.call("method", "x")).value, answer)
"""

#: Kept between runs: without it, the checker reads the whole SDK and what it imports.
CACHE = Path(__file__).parents[2] / ".mypy_cache" / "plugins"

BAD = {
    "plugin.store.set(store_key=1)": "arg-type",
    "method(ctx, 3)": "arg-type",
    "plugin.get_config(int)": "type-var",
    "ctx.no_such_name": "attr-defined",
    "core.no_such_name": "attr-defined",
    "NekroPlugin()": "call-arg",
    "TaskCtl.report_progress(1)": "arg-type",
}


def test_a_strict_checker_accepts_good_plugins_and_finds_mistakes(tmp_path: Path) -> None:
    (tmp_path / "good.py").write_text(GOOD)
    bad = GOOD + "\n\nasync def bad(ctx: AgentCtx) -> None:\n"
    for line in BAD:
        bad += f"    {line}\n"
    (tmp_path / "bad.py").write_text(bad)
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--strict",
        "--no-error-summary",
        "--cache-dir",
        str(CACHE),
    ]
    run = subprocess.run([*command, "good.py", "bad.py"], cwd=tmp_path, capture_output=True, text=True)
    reported = [line for line in run.stdout.splitlines() if "error:" in line]
    assert [line for line in reported if line.startswith("good.py")] == []
    first = bad.splitlines().index(f"    {next(iter(BAD))}") + 1
    for number, code in enumerate(BAD.values(), start=first):
        assert any(line.startswith(f"bad.py:{number}:") and f"[{code}]" in line for line in reported), (
            reported
        )
