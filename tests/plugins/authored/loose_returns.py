"""Results that are not what their type asks for, as published plugins return them."""

from nekro_agent.api.plugin import NekroPlugin, SandboxMethodType
from nekro_agent.api.schemas import AgentCtx
from nekro_agent.services.agent.creator import ContentSegment, OpenAIChatMessage

plugin = NekroPlugin(
    name="loose", module_name="loose_returns", description="", version="1", author="Ada", url=""
)


@plugin.mount_sandbox_method(SandboxMethodType.AGENT, "search")
async def agent_dict(_ctx: AgentCtx, query: str) -> dict:
    """Return a dict from an AGENT method."""
    return {"query": query, "hits": 2}


@plugin.mount_sandbox_method(SandboxMethodType.BEHAVIOR, "switch")
async def behavior_bool(_ctx: AgentCtx, on: bool) -> bool:
    """Return a bool from a BEHAVIOR method."""
    return not on


@plugin.mount_sandbox_method(SandboxMethodType.BEHAVIOR, "silent")
async def behavior_none(_ctx: AgentCtx) -> None:
    """Return nothing from a BEHAVIOR method."""


@plugin.mount_sandbox_method(SandboxMethodType.MULTIMODAL_AGENT, "message")
async def multimodal_message(_ctx: AgentCtx) -> dict:
    """Return a whole message."""
    message = OpenAIChatMessage.from_text("user", "look")
    message.add(ContentSegment.image_content_from_bytes(b"\x89PNG", "png"))
    return message.to_dict()


@plugin.mount_sandbox_method(SandboxMethodType.MULTIMODAL_AGENT, "part")
async def multimodal_part(_ctx: AgentCtx) -> dict:
    """Return one part."""
    return ContentSegment.text_content("only text")


@plugin.mount_sandbox_method(SandboxMethodType.MULTIMODAL_AGENT, "nonsense")
async def multimodal_number(_ctx: AgentCtx) -> int:
    """Return what is no content."""
    return 42
