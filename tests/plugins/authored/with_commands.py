"""Commands: arguments, a group, an answer in steps, and a question back."""

import os
from typing import Annotated

from nekro_agent.api.plugin import (
    Arg,
    CmdCtl,
    CommandExecutionContext,
    CommandPermission,
    CommandResponse,
    NekroPlugin,
)

try:
    from nekro_agent.api.plugin import CommandOutputSegment, CommandOutputSegmentType
except ImportError:
    from nekro_agent.services.command.schemas import CommandOutputSegment, CommandOutputSegmentType

plugin = NekroPlugin(
    name="commands", module_name="with_commands", description="", version="1", author="Ada", url=""
)


@plugin.mount_command(
    name="weather", description="天气", aliases=["天气"], permission=CommandPermission.PUBLIC, usage="weather <city>"
)
async def weather(
    context: CommandExecutionContext,
    city: Annotated[str, Arg("city", positional=True)],
    days: Annotated[int, Arg("days", range=(1, 7))] = 1,
    unit: str = Arg("unit", default="C", choices=["C", "F"]),
) -> CommandResponse:
    """Tell the weather."""
    return CmdCtl.success(f"{city} {days} {unit} for {context.username}", data={"city": city})


@plugin.mount_command(name="rebuild", description="", permission=CommandPermission.SUPER_USER)
async def rebuild(context: CommandExecutionContext):
    """Answer in steps."""
    yield CmdCtl.message("started")
    report = plugin.get_plugin_data_dir() / "report"
    report.write_text("rebuilt")
    yield CmdCtl.success(
        [
            CommandOutputSegment(type=CommandOutputSegmentType.TEXT, text="done"),
            CommandOutputSegment(type=CommandOutputSegmentType.FILE, file_path=str(report)),
        ]
    )


@plugin.mount_command(name="say", description="")
async def say(context: CommandExecutionContext, text: Annotated[str, Arg("text", positional=True, greedy=True)]):
    """Repeat."""
    return text


@plugin.mount_command(name="ask", description="")
async def ask(context: CommandExecutionContext):
    """Ask back."""
    return CmdCtl.wait("which one?", callback_cmd="answer", options=["1", "2"], timeout=30)


@plugin.mount_command(name="answer", description="", internal=True)
async def answer(context: CommandExecutionContext, choice: int):
    """Take the answer."""
    return CmdCtl.success(str(choice + 1))


@plugin.mount_command(name="broken", description="")
async def broken(context: CommandExecutionContext):
    """Fail."""
    raise RuntimeError("out of order")


group = plugin.mount_command_group(name="cfg", description="", permission=CommandPermission.ADVANCED)


@group.command(name="set", description="", aliases=["put"])
async def cfg_set(
    context: CommandExecutionContext,
    key: Annotated[str, Arg("key", positional=True)],
    value: Annotated[float, Arg("value", positional=True)],
):
    """Set a value."""
    await plugin.store.set(store_key=key, value=str(value))
    return CmdCtl.success(f"{key} = {value}")


_visits = 0


@plugin.mount_command(name="visits", description="", permission=CommandPermission.PUBLIC)
async def visits(context: CommandExecutionContext):
    """Count, in the module."""
    global _visits
    _visits += 1
    return CmdCtl.success("counted", data={"visits": _visits, "process": os.getpid()})


@plugin.mount_command(name="order", description="")
async def order(
    context: CommandExecutionContext, what: Annotated[str, Arg("what", positional=True)], timeout: float = 60.0
):
    """Ask back and hand something on."""
    return CmdCtl.wait(
        "how much?",
        callback_cmd="order_amount",
        timeout=timeout,
        on_timeout_message="the kitchen is closed",
        context_data={"what": what},
    )


@plugin.mount_command(name="order_amount", description="", internal=True)
async def order_amount(context: CommandExecutionContext, amount: Annotated[str, Arg("how much", greedy=True)]):
    """Take the answer."""
    return f"{context.context_data['what']}: {amount}"


class Box:
    """A class that only this plugin knows."""


@plugin.mount_command(name="attach", description="")
async def attach(context: CommandExecutionContext):
    """Attach what no other process can make."""
    return CmdCtl.success("done", data={"box": Box()})
