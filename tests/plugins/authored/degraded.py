"""Imports parts of the reference that do not exist here; the rest works."""

from nonebot.adapters.onebot.v11 import Bot, MessageEvent
from nonebot.params import CommandArg

from nekro_agent.adapters.onebot_v11.matchers.command import command_guard, finish_with, on_command
from nekro_agent.api.core import get_qdrant_client
from nekro_agent.api.plugin import NekroPlugin, SandboxMethodType
from nekro_agent.api.schemas import AgentCtx
from nekro_agent.services.workspace.manager import WorkspaceService
from nekro_agent.services.workspace.models import BaseWorkspace

try:
    from nekro_agent.tools.something_new import better
except ImportError:
    better = None

plugin = NekroPlugin(name="degraded", module_name="degraded", description="", version="1", author="Ada", url="")


class Mine(BaseWorkspace):
    """A subclass of what does not exist."""


@on_command("wave", aliases={"hi"}, priority=5, block=True).handle()
async def wave(event: MessageEvent, bot: Bot, arg=CommandArg()):
    """Never runs here."""
    await command_guard(event, bot)
    await finish_with("hi")


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "fine")
async def fine(_ctx: AgentCtx, service: "WorkspaceService | None" = None) -> str:
    """Work."""
    return f"fine, better={better}"


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "vectors")
async def search_vectors(_ctx: AgentCtx) -> str:
    """Need what is missing."""
    client = await get_qdrant_client()
    return str(client)


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "workspace")
async def open_workspace(_ctx: AgentCtx) -> str:
    """Need what is missing."""
    return WorkspaceService.default_name


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "mine")
async def make_mine(_ctx: AgentCtx) -> str:
    """Build the subclass."""
    return str(Mine())
