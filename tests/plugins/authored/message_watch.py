"""Watches each message of the agent by wrapping the service that records them; its commands are objects."""

from typing import Annotated, Any, List

from nekro_agent.api.plugin import Arg, CmdCtl, NekroPlugin, SandboxMethodType
from nekro_agent.api.schemas import AgentCtx, MessageContent
from nekro_agent.services.command.base import BaseCommand, CommandMetadata
from nekro_agent.services.command.registry import command_registry
from nekro_agent.services.message_service import message_service

plugin = NekroPlugin("message watch", "message_watch", "", "1", "Ada", "")

_original: Any = None
_seen: List[List[str]] = []


async def _watch(chat_key: str, agent_messages: MessageContent, db_chat_channel: Any = None) -> None:
    await _original(chat_key=chat_key, agent_messages=agent_messages, db_chat_channel=db_chat_channel)
    _seen.extend([chat_key, str(part.type), part.content] for part in agent_messages)


class Watched(BaseCommand):
    """Counts."""

    @property
    def metadata(self) -> CommandMetadata:
        return CommandMetadata(name="watched", description="Counts messages")

    async def execute(self, context, least: Annotated[int, Arg("least", positional=True)] = 0):
        yield CmdCtl.success(f"messages: {max(least, 0)}")


class WatchedLate(BaseCommand):
    """Registered by the init."""

    @property
    def metadata(self) -> CommandMetadata:
        return CommandMetadata(name="watched_late", description="Registered late")

    async def execute(self, context):
        return CmdCtl.success("registered in the init")


command_registry.register(Watched())


@plugin.mount_init_method()
async def start() -> None:
    global _original
    command_registry.register(WatchedLate())
    _original = message_service.push_bot_message
    message_service.push_bot_message = _watch


@plugin.mount_cleanup_method()
async def stop() -> None:
    message_service.push_bot_message = _original


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "seen")
async def seen_messages(_ctx: AgentCtx) -> list:
    """Return what was seen since the last call."""
    seen, _seen[:] = list(_seen), []
    return seen
