"""群聊日记: what was said in a group, with reminders; written against OneBot and the database of v1."""

import asyncio
import datetime
import time
from typing import Annotated, List

from nonebot import on_notice
from nonebot.adapters.onebot.v11 import Bot, GroupIncreaseNoticeEvent, Message, MessageEvent
from nonebot.matcher import Matcher
from nonebot.params import CommandArg

from nekro_agent.adapters.onebot_v11.core.bot import get_bot
from nekro_agent.adapters.onebot_v11.matchers.command import command_guard, finish_with, on_command
from nekro_agent.adapters.onebot_v11.tools.onebot_util import get_chat_info_old
from nekro_agent.api import message, timer
from nekro_agent.api.plugin import (
    Arg,
    CmdCtl,
    CommandExecutionContext,
    CommandPermission,
    NekroPlugin,
    SandboxMethodType,
)
from nekro_agent.api.schemas import AgentCtx
from nekro_agent.api.signal import MsgSignal
from nekro_agent.core import config as core_config
from nekro_agent.core import logger
from nekro_agent.models.db_chat_channel import DBChatChannel
from nekro_agent.models.db_chat_message import DBChatMessage
from nekro_agent.schemas.chat_message import ChatMessage, ChatType
from nekro_agent.services.message_service import message_service
from nekro_agent.services.timer.timer_service import timer_service

plugin = NekroPlugin(
    name="群聊日记",
    module_name="group_diary",
    description="记录群聊并定时总结",
    version="1.2.0",
    author="Ada",
    url="https://example.com/diary",
    support_adapter=["onebot_v11"],
)

_worker: asyncio.Task | None = None
_queue: asyncio.Queue | None = None
_counts: dict[str, int] = {}
_answered: set[int] = set()

welcome = on_notice(priority=5, block=False)


@welcome.handle()
async def _(bot: Bot, event: GroupIncreaseNoticeEvent):
    await welcome.finish(f"welcome {event.user_id}")


@on_command("diary", aliases={"日记"}, priority=5, block=True).handle()
async def _(matcher: Matcher, event: MessageEvent, bot: Bot, arg: Message = CommandArg()):
    username, cmd_content, chat_key, chat_type = await command_guard(event, bot, arg, matcher)
    await finish_with(matcher, message=f"{username}: {cmd_content}")


@on_command("diary_last", block=True).handle()
async def _(matcher: Matcher, event: MessageEvent):
    if event.message_id in _answered:
        await matcher.finish("again")
    _answered.add(event.message_id)
    chat_key, chat_type = await get_chat_info_old(event)
    await matcher.finish(f"{chat_key} {chat_type.value} {event.get_session_id()}")


async def _count_messages() -> None:
    while True:
        chat_key = await _queue.get()
        _counts[chat_key] = _counts.get(chat_key, 0) + 1
        _queue.task_done()


@plugin.mount_init_method()
async def start():
    """启动后台任务"""
    global _worker, _queue
    _queue = asyncio.Queue()
    _worker = asyncio.create_task(_count_messages())
    logger.info(f"diary started, proxy: {core_config.DEFAULT_PROXY}")


@plugin.mount_cleanup_method()
async def stop():
    """停止后台任务"""
    if _worker:
        _worker.cancel()


@plugin.mount_on_user_message()
async def on_message(_ctx: AgentCtx, chatmessage: ChatMessage) -> MsgSignal:
    if chatmessage.chat_type == ChatType.GROUP and chatmessage.content_text.startswith("#"):
        return MsgSignal.BLOCK_TRIGGER
    return MsgSignal.CONTINUE


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "写日记")
async def write_diary(_ctx: AgentCtx, text: str) -> int:
    """Write a line into the diary of this chat and return how many there are."""
    await _queue.put(_ctx.chat_key)
    await _queue.join()
    path = plugin.get_plugin_data_dir() / f"{_ctx.chat_key}.txt"
    with path.open("a", encoding="utf-8") as file:
        file.write(f"{datetime.datetime.now().isoformat()}\t{text}\n")
    return _counts[_ctx.chat_key]


@plugin.mount_sandbox_method(SandboxMethodType.AGENT, "总结群聊")
async def summarize_chat(_ctx: AgentCtx, hours: float = 1.0, limit: int = 50) -> str:
    """Summarize what was said.

    Args:
        hours (float): How far back.
        limit (int): How many messages at most.
    """
    since = int(time.time() - hours * 3600)
    rows: List[DBChatMessage] = (
        await DBChatMessage.filter(chat_key=_ctx.chat_key, send_timestamp__gte=since)
        .order_by("-send_timestamp")
        .limit(limit)
    )
    channel = await DBChatChannel.get_channel(chat_key=_ctx.chat_key)
    lines = [f"{row.sender_nickname or row.sender_id}: {row.content_text}" for row in reversed(rows)]
    return f"{channel.chat_key} said {len(lines)} things:\n" + "\n".join(lines)


@plugin.mount_sandbox_method(SandboxMethodType.BEHAVIOR, "通知")
async def notify_chat(_ctx: AgentCtx, text: str, wake: bool = False) -> str:
    """Send a text and leave a note for the agent."""
    await message.send_text(_ctx.chat_key, text, _ctx)
    await message_service.push_system_message(
        chat_key=_ctx.chat_key, agent_messages=f"[diary] {text}", trigger_agent=wake
    )
    return "sent"


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "设置提醒")
async def remind_diary(_ctx: AgentCtx, in_seconds: int, what: str) -> list:
    """Set a reminder, by the service object and by the module."""
    at = int(time.time()) + in_seconds
    await timer_service.set_timer(_ctx.chat_key, at, what, silent=True)
    await timer.set_timer(_ctx.chat_key, at + 1, what + " again")
    return [task.event_desc for task in timer.get_timers(_ctx.chat_key)]


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "群成员")
async def group_members(_ctx: AgentCtx) -> list:
    """List the members of the group; needs a connection to OneBot."""
    bot: Bot = get_bot()
    return await bot.get_group_member_list(group_id=int(_ctx.chat_key.split("_")[1]))


@plugin.mount_command(
    name="diary_count", description="日记条数", aliases=["日记数"], permission=CommandPermission.PUBLIC, category="日记"
)
async def diary_count(
    context: CommandExecutionContext, least: Annotated[int, Arg("least", positional=True)] = 0
):
    return CmdCtl.success(f"{max(_counts.get(context.chat_key, 0), least)}")
