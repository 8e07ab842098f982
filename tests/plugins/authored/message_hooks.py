"""Hooks of messages, prompts and resets."""

from nekro_agent.api.plugin import NekroPlugin, SandboxMethodType
from nekro_agent.api.schemas import AgentCtx
from nekro_agent.api.signal import MsgSignal
from nekro_agent.schemas.chat_message import ChatMessage

plugin = NekroPlugin(
    name="hooks", module_name="message_hooks", description="", version="1", author="Ada", url=""
)


@plugin.mount_on_user_message()
async def on_user(_ctx: AgentCtx, chat_message: ChatMessage) -> MsgSignal:
    """Block, force, or let pass."""
    await plugin.store.set(
        chat_key=_ctx.chat_key,
        store_key="last",
        value=f"{_ctx.from_platform_userid}: {chat_message.content_text}",
    )
    if "spam" in chat_message.content_text:
        return MsgSignal.BLOCK_ALL
    if "wake" in chat_message.content_text:
        return MsgSignal.FORCE_TRIGGER
    return None


@plugin.mount_on_system_message()
async def on_system(_ctx: AgentCtx, text: str):
    """Drop noise."""
    return MsgSignal.BLOCK_ALL if text.startswith("noise") else MsgSignal.CONTINUE


@plugin.mount_prompt_inject_method("hint", "a hint")
async def inject(_ctx: AgentCtx) -> str:
    """Add a hint."""
    return f"The last message was {await plugin.store.get(chat_key=_ctx.chat_key, store_key='last')}."


@plugin.mount_on_channel_reset()
async def on_reset(_ctx: AgentCtx):
    """Forget."""
    await plugin.store.delete(chat_key=_ctx.chat_key, store_key="last")


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "push")
async def push(_ctx: AgentCtx, text: str, wake: bool = False) -> None:
    """Push a system message."""
    await _ctx.push_system(text, trigger_agent=wake)


@plugin.mount_sandbox_method(SandboxMethodType.AGENT, "研究")
async def study(_ctx: AgentCtx, text: str) -> str:
    """Wake the agent with a text."""
    return text


@plugin.mount_sandbox_method(SandboxMethodType.BEHAVIOR, "记录")
async def note_down(_ctx: AgentCtx, text: str) -> str:
    """Put a text into the history."""
    return text
