"""Methods, jobs and a configuration with secrets, for the tests of the API."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, Field, SecretStr

from nekro_agent.api.plugin import (
    CmdCtl,
    CommandExecutionContext,
    CommandOutputSegment,
    CommandOutputSegmentType,
    ConfigBase,
    ExtraField,
    NekroPlugin,
    SandboxMethodType,
    TaskCtl,
)
from nekro_agent.api.plugin import task as tasks
from nekro_agent.api.schemas import AgentCtx

plugin = NekroPlugin("operated", "operated", "For tests of the API.", "1.0.0", "Ada", "")


class Server(BaseModel):
    url: str = "http://localhost"
    password: SecretStr = SecretStr("")


@plugin.mount_config()
class Config(ConfigBase):
    LIMIT: int = Field(3, ge=1, le=10)
    TOKEN: str = Field("default-token", json_schema_extra=ExtraField(is_secret=True).model_dump())
    SERVER: Server = Server()


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "echo")
async def echo(_ctx: AgentCtx, value: Any) -> Any:
    """Return the value."""
    return value


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "strange")
async def strange(_ctx: AgentCtx) -> list[Any]:
    """Return what JSON lacks."""
    return [float("nan"), b"bytes"]


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "limit")
async def limit(_ctx: AgentCtx) -> int:
    """Return the configured limit."""
    return plugin.get_config(Config).LIMIT


@plugin.mount_sandbox_method(SandboxMethodType.BEHAVIOR, "count")
async def count(ctx: AgentCtx) -> str:
    """Count calls."""
    number = int(await plugin.store.get(chat_key=ctx.chat_key, store_key="count") or 0) + 1
    await plugin.store.set(chat_key=ctx.chat_key, store_key="count", value=str(number))
    return str(number)


@plugin.mount_command(name="tally", description="Count commands")
async def tally(context: CommandExecutionContext) -> Any:
    number = int(await plugin.store.get(chat_key=context.chat_key, store_key="tally") or 0) + 1
    await plugin.store.set(chat_key=context.chat_key, store_key="tally", value=str(number))
    yield CmdCtl.success(str(number))


@plugin.mount_command(name="ask", description="Ask for a colour")
async def ask(context: CommandExecutionContext) -> Any:
    yield CmdCtl.wait("Which colour?", callback_cmd="chosen")


@plugin.mount_command(name="chosen", description="Take the colour", internal=True)
async def chosen(context: CommandExecutionContext, colour: str) -> Any:
    yield CmdCtl.success(f"chose {colour}")


@plugin.mount_command(name="chart", description="Draw, and remove the drawing")
async def chart(context: CommandExecutionContext) -> Any:
    drawn = plugin.get_plugin_data_dir() / "drawn.svg"
    drawn.write_text("<svg/>")
    paths = {"chart.svg": drawn, "host.txt": "/etc/hostname", "gone.svg": drawn.with_name("gone.svg")}
    image = CommandOutputSegmentType.IMAGE
    yield CmdCtl.message(
        [CommandOutputSegment(type=image, file_path=str(paths[name]), file_name=name) for name in paths]
    )
    drawn.unlink()
    yield CmdCtl.success("done")


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "fail")
async def fail(_ctx: AgentCtx) -> None:
    """Raise."""
    raise RuntimeError("it failed on purpose")


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "fail_with")
async def fail_with(_ctx: AgentCtx, text: str) -> None:
    """Raise with a text."""
    raise RuntimeError(text)


@plugin.mount_async_task("waiting")
async def waiting(handle: Any) -> Any:
    yield TaskCtl.report_progress("waits", 10)
    data = await handle.wait("go")
    yield TaskCtl.success(f"got {data}")


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "begin")
async def begin(ctx: AgentCtx, name: str) -> str:
    """Start a job."""
    await tasks.start(task_type="waiting", task_id=name, chat_key=ctx.chat_key, plugin=plugin)
    return name
