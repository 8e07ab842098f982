"""群管家: bans, personas and forgotten messages, through the models of the database."""

import datetime

from nekro_agent.api.plugin import NekroPlugin, SandboxMethodType
from nekro_agent.api.schemas import AgentCtx
from nekro_agent.api.signal import MsgSignal
from nekro_agent.models.db_chat_channel import DBChatChannel
from nekro_agent.models.db_chat_message import DBChatMessage
from nekro_agent.models.db_preset import DBPreset
from nekro_agent.models.db_user import DBUser
from nekro_agent.schemas.chat_message import ChatMessage

plugin = NekroPlugin(
    name="群管家",
    module_name="warden",
    description="管理群聊",
    version="1.0.0",
    author="Ada",
    url="https://example.com/warden",
    support_adapter=["onebot_v11"],
)


@plugin.mount_on_user_message()
async def on_message(_ctx: AgentCtx, message: ChatMessage) -> MsgSignal | None:
    user = _ctx.db_user
    if user is not None and "buy now" in message.content_text:
        user.ban_until = datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=1)
        await user.save()
    if message.content_text.startswith("!quiet"):
        user.prevent_trigger_until = datetime.datetime.now(datetime.UTC) + datetime.timedelta(hours=1)
        await user.save()
    if message.content_text.startswith("!tidy"):
        message.content_text = message.content_text.removeprefix("!tidy").strip()
        message.sender_nickname = "tidied"
        message.ext_data["tidied_by"] = plugin.key
        message.is_tome = 0
    if message.content_text == "!break":
        message.content_text = None
    if message.content_text is not None and message.content_text.startswith("!wake"):
        return MsgSignal.FORCE_TRIGGER
    return None


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, name="更换人设", description="换一个人设")
async def change_persona(_ctx: AgentCtx, name: str, content: str) -> str:
    """Change the agent's persona in this chat.

    Args:
        name (str): name of the persona
        content (str): what the persona is
    """
    if _ctx.adapter_key != "onebot_v11":
        return f"not available in this adapter. Current adapter: {_ctx.adapter_key}"
    preset = await DBPreset.create(
        name=name, title=name, avatar="", content=content, description="", tags="", author=""
    )
    channel: DBChatChannel = await DBChatChannel.get_channel(chat_key=_ctx.chat_key)
    return await channel.set_preset(preset.id)


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, name="忘记", description="删除消息")
async def forget(_ctx: AgentCtx, part: str) -> int:
    """Delete the messages of this chat that contain a text.

    Args:
        part (str): the text
    """
    messages: list[DBChatMessage] = await DBChatMessage.filter(
        chat_key=_ctx.chat_key, content_text__contains=part
    )
    for message in messages:
        await message.delete()
    return len(messages)


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, name="赦免", description="解除封禁")
async def pardon(_ctx: AgentCtx, user_id: str) -> str:
    """Lift the ban of a person.

    Args:
        user_id (str): id of the person
    """
    user = await DBUser.get_by_union_id(adapter_key=_ctx.adapter_key, platform_userid=user_id)
    if not user:
        return "no such person"
    user.ban_until = None
    await user.save()
    return f"{user.unique_id} is free: {user.is_active}"
