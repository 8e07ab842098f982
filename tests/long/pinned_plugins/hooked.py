"""A plugin that lives in one process and whose hooks read what its init has put there."""

import os

from nekro_agent.api.plugin import NekroPlugin, SandboxMethodType
from nekro_agent.api.schemas import AgentCtx
from nekro_agent.api.signal import MsgSignal
from nekro_agent.schemas.chat_message import ChatMessage

plugin = NekroPlugin(
    name="Hooked",
    module_name="hooked",
    description="Looks at what goes on.",
    version="1.0.0",
    author="tests",
    url="",
)
plugin.pinned = True
state: dict[str, object] = {}


@plugin.mount_init_method()
async def init() -> None:
    """Fill the memory that the hooks use."""
    state.update(word="spam", seen=[], pid=os.getpid())


@plugin.mount_prompt_inject_method("memory")
async def inject(_ctx: AgentCtx) -> str:
    """Return what is in memory."""
    return f"{_ctx.chat_key} for {_ctx.from_user_id}: {state['seen']} in {state['pid']}"


@plugin.mount_on_user_message()
async def on_message(_ctx: AgentCtx, message: ChatMessage) -> MsgSignal | None:
    """Remember a message; block those with the word."""
    if message.content_text == "break":
        raise RuntimeError("out of order")
    state["seen"].append(f"{message.sender_name}: {message.content_text}")  # type: ignore[attr-defined]
    return MsgSignal.BLOCK_ALL if str(state["word"]) in message.content_text else None


@plugin.mount_on_system_message()
async def on_system(_ctx: AgentCtx, text: str) -> MsgSignal | None:
    """Block system messages with the word."""
    return MsgSignal.BLOCK_ALL if str(state["word"]) in text else None


@plugin.mount_on_channel_reset()
async def on_reset(_ctx: AgentCtx) -> None:
    """Forget."""
    state["seen"] = [f"reset of {_ctx.chat_key}"]


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "owner", "Tells the owner")
async def hooked_owner(_ctx: AgentCtx) -> int:
    """Return this process's id."""
    return os.getpid()
