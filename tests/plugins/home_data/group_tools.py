"""群工具: works in OneBot groups only, as its author checks at every call."""

import time
from typing import List

from nekro_agent.api.plugin import NekroPlugin, SandboxMethodType
from nekro_agent.api.schemas import AgentCtx
from nekro_agent.core import config
from nekro_agent.models.db_chat_channel import DBChatChannel
from nekro_agent.models.db_chat_message import DBChatMessage
from nekro_agent.models.db_user import DBUser

plugin = NekroPlugin(
    name="群工具",
    module_name="group_tools",
    description="QQ 群工具",
    version="0.3.1",
    author="Bob",
    url="https://example.com/group_tools",
    support_adapter=["onebot_v11"],
)


def _group_number(_ctx: AgentCtx) -> int:
    if _ctx.adapter_key != "onebot_v11":
        raise ValueError(f"not available in this adapter. Current adapter: {_ctx.adapter_key}")
    if _ctx.channel_type != "group":
        raise ValueError("only in groups")
    return int(_ctx.channel_id.split("_")[1])


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, name="群信息", description="")
async def group_info(_ctx: AgentCtx) -> str:
    """Return the number and the type of this group."""
    channel = _ctx.db_chat_channel
    return f"{_group_number(_ctx)} {channel.chat_type.value} {channel.channel_status.value}"


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, name="禁言", description="")
async def ban(_ctx: AgentCtx, user_id: str) -> str:
    """Ban a member for an hour.

    Args:
        user_id (str): id of the member
    """
    _group_number(_ctx)
    user = await DBUser.get_by_union_id(adapter_key=_ctx.adapter_key, platform_userid=user_id)
    if not user:
        user = await DBUser.create(
            username=user_id, password="", adapter_key=_ctx.adapter_key, platform_userid=user_id, perm_level=1
        )
    import datetime

    user.ban_until = datetime.datetime.now() + datetime.timedelta(hours=24)
    await user.save()
    return f"{user.unique_id} active={user.is_active}"


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, name="最近消息", description="")
async def recent(_ctx: AgentCtx) -> List[str]:
    """Return the recent messages that prompts may show."""
    db_chat_channel: DBChatChannel = await DBChatChannel.get_channel(chat_key=_ctx.from_chat_key)
    recent_chat_messages: List[DBChatMessage] = await (
        DBChatMessage.filter(
            send_timestamp__gte=max(
                int(time.time() - config.AI_CHAT_CONTEXT_EXPIRE_SECONDS),
                db_chat_channel.conversation_start_time.timestamp(),
            ),
            chat_key=_ctx.from_chat_key,
        )
        .order_by("-send_timestamp")
        .limit(config.AI_CHAT_CONTEXT_MAX_LENGTH)
    )
    return [f"{m.sender_name}:{m.content_text}:{m.is_tome}:{m.is_system}" for m in recent_chat_messages]
