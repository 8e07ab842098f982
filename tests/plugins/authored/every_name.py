"""Names of the API that few plugins use, each at its path and as it is documented."""

import asyncio
from pathlib import Path
from typing import Any, Dict, List

from pydantic import Field

from nekro_agent.api import core, i18n, message, recurring_timer, schemas, timer
from nekro_agent.api.plugin import (
    AsyncTaskHandle,
    CmdCtl,
    CommandExecutionContext,
    CommandOutputSegment,
    CommandOutputSegmentType,
    ConfigBase,
    ExtraField,
    NekroPlugin,
    SandboxMethod,
    SandboxMethodType,
    TaskCtl,
    TaskSignal,
    task,
)
from nekro_agent.core.os_env import USER_UPLOAD_DIR, OsEnv
from nekro_agent.models.db_chat_channel import DBChatChannel, DefaultPreset
from nekro_agent.schemas.chat_message import ChatMessage
from nekro_agent.services.message_service import message_service
from nekro_agent.tools import path_convertor

plugin = NekroPlugin("every name", "every_name", " padded ", " 2.0 ", "Ada", " https://example.com ", webui_path="ui")


@plugin.mount_config()
class Config(ConfigBase):
    GROUP: str = Field(
        default="default",
        title="Model group",
        json_schema_extra=ExtraField(ref_model_groups=True, model_type="chat", load_to_sysenv=True).model_dump(),
    )


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "plugin facts")
async def plugin_facts(_ctx: schemas.AgentCtx) -> Dict[str, Any]:
    """What a plugin reads of itself."""
    other = plugin.get_plugin_data_dir() / "other.yaml"
    made = Config.load_config(other)
    made.load_config_to_env()
    return {
        "identity": [plugin.name, plugin.module_name, plugin.key, plugin.version, plugin.author, plugin.url],
        "description": plugin.description,
        "enabled": plugin.is_enabled,
        "adapters": plugin.support_adapter,
        "webui": plugin.webui_path,
        "methods": [method.func.__name__ for method in plugin.sandbox_methods][:2],
        "type": plugin_facts._method_type.value,
        "file": [other.is_file(), Config.load_from_path(other).GROUP],
        "titles": [Config.get_field_title("GROUP"), Config.get_field_title("NONE")],
        "collection": plugin.get_vector_collection_name("notes"),
        "depth": plugin.get_plugin_path().parents[1] == Path(OsEnv.DATA_DIR),
        "uploads": path_convertor.convert_filename_to_access_path("a/b.txt", _ctx.chat_key).parent.parent
        == Path(USER_UPLOAD_DIR),
        "docs": plugin.get_docs()[:5],
        "store": plugin.store is not plugin.store,
    }


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "context facts")
async def context_facts(_ctx: schemas.AgentCtx) -> Dict[str, Any]:
    """What a context offers beyond files and messages."""
    core_config = await _ctx.get_core_config()
    channel = await DBChatChannel.get_channel(chat_key=_ctx.chat_key)
    looked_up = schemas.AgentCtx.create_by_db_chat_channel(channel)
    awaited = await schemas.AgentCtx.create_by_db_chat_channel(channel, container_key="box")
    by_key = await schemas.AgentCtx.create_by_chat_key("other-chat")
    preset = await _ctx.get_effective_preset_by_id(5)
    try:
        core.config.get_model_group_info("nobody's")
        group = "found"
    except KeyError:
        group = "KeyError"
    try:
        _ctx.get_onebot_v11_bot()
        bot = "found"
    except ValueError:
        bot = "ValueError"
    return {
        "factories": [looked_up.chat_key, looked_up.container_key == _ctx.container_key, awaited.container_key],
        "by_key": [by_key.chat_key, by_key.from_user_id],
        "preset": [isinstance(preset, DefaultPreset), await _ctx.get_preset_by_id(5), (await channel.get_preset()).id],
        "proxy": core_config.DEFAULT_PROXY,
        "group": group,
        "bot": bot,
        "workspace": await _ctx.get_bound_workspace(),
        "module": _ctx.ms is message,
        "user": [_ctx.from_platform_userid, _ctx.db_user.platform_userid],
        "channel": _ctx.db_chat_channel.chat_key,
    }


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "messages")
async def all_messages(_ctx: schemas.AgentCtx) -> None:
    """Every way to say something."""
    await message.send_text(_ctx.chat_key, "one", _ctx, ref_msg_id="m1")
    await _ctx.ms.send_text(_ctx.chat_key, "two", _ctx)
    await _ctx.send_text("three", record=True)
    await _ctx.push_system("four")
    await message.push_system(_ctx.chat_key, "five")
    await message_service.push_system_message(chat_key=_ctx.chat_key, agent_messages="six")
    await message_service.schedule_agent_task(chat_key=_ctx.chat_key)


@plugin.mount_async_task("watch")
async def watch(handle: AsyncTaskHandle, keys: List[str]):
    """Waits until its waits are cancelled."""
    yield TaskCtl.report_progress("waiting", 33.3)
    try:
        await handle.wait(keys[0])
    except asyncio.CancelledError:
        yield TaskCtl.fail(f"wait cancelled, job cancelled: {handle.is_cancelled}", error=ValueError("x"))


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "jobs")
async def job_facts(_ctx: schemas.AgentCtx) -> Dict[str, Any]:
    """Start jobs, look at them, and end one wait."""
    handle = await task.start("watch", "w1", _ctx.chat_key, plugin, ["never"])
    await task.start("watch", "w2", _ctx.chat_key, plugin, keys=["never"])
    known = task.get_handle("watch", "w1")
    facts = {
        "ids": [handle.task_id, handle.chat_key, known.task_id, handle.plugin is plugin],
        "running": sorted(task.get_running_tasks()),
        "is_running": [task.is_running("watch", "w1"), task.is_running("watch", "nothing")],
        "unknown": [task.get_handle("watch", "nothing"), task.get_state("watch", "nothing")],
        "runner": task.runner() is task,
        "terminal": [TaskCtl.cancel("x").is_terminal, TaskCtl.report_progress("x", 1000).progress],
        "signal": TaskCtl.fail("x").signal is TaskSignal.FAIL,
    }
    facts["stopped"] = await task.stop_all()
    return facts


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "timers")
async def timer_facts(_ctx: schemas.AgentCtx) -> Dict[str, Any]:
    """A recurring timer's life."""
    job = await recurring_timer.create_cron_job(
        _ctx.chat_key, "0 9 * * 1-5", "stand-up", "Asia/Tokyo", workday_mode="mon_fri", title="Daily"
    )
    key = job.job_id
    listed = await recurring_timer.list_jobs(_ctx.chat_key)
    await recurring_timer.update_job(key, event_desc="retro")
    await recurring_timer.pause_job(key)
    paused = (await recurring_timer.get_job(key)).status
    await recurring_timer.resume_job(key)
    active, stopped, upcoming, recent = await recurring_timer.get_job_summary(_ctx.chat_key)
    return {
        "listed": [entry.job_id == key for entry in listed],
        "paused": paused,
        "summary": [active, stopped, [entry.event_desc for entry in upcoming], len(recent)],
        "run": await recurring_timer.run_now(key),
        "deleted": [await recurring_timer.delete_job(key), await recurring_timer.delete_job(key)],
        "valid": [recurring_timer.validate_timezone("UTC"), recurring_timer.validate_cron_expr("0  9 * * *")],
        "cleared": await timer.clear_timers(_ctx.chat_key, temporary=True),
    }


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "texts")
async def texts_in(_ctx: schemas.AgentCtx, lang: str) -> str:
    """A text in two languages."""
    texts = i18n.i18n_text(zh_CN="你好", en_US="hello")
    return i18n.get_text(texts, "?", i18n.SupportedLang(lang))


@plugin.mount_command("segments", "Answers in parts", aliases=["parts"])
async def segments(context: CommandExecutionContext):
    """Every kind of part."""
    yield CmdCtl.message("working")
    picture = plugin.get_plugin_data_dir() / "a.png"
    picture.write_bytes(b"")
    yield CmdCtl.success(
        [
            CommandOutputSegment(type=CommandOutputSegmentType.TEXT, text=f"for {context.user_id}"),
            CommandOutputSegment(type=CommandOutputSegmentType.IMAGE, file_path=str(picture), mime_type="image/png"),
            CommandOutputSegment(type=CommandOutputSegmentType.FILE, web_url="https://example.com/a", file_name="a"),
        ]
    )


@plugin.mount_collect_methods()
async def collect(_ctx: schemas.AgentCtx) -> List[SandboxMethod]:
    """The first two as SandboxMethod, the others as functions."""
    return [*plugin.sandbox_methods[:2], *(method.func for method in plugin.sandbox_methods[2:])]


@plugin.mount_on_user_message()
async def see(_ctx: schemas.AgentCtx, seen: ChatMessage) -> None:
    """Reads what plugins read of a message."""
    fields = [seen.sender_name, seen.sender_nickname, seen.platform_userid, seen.content_data, seen.is_tome]
    core.logger.debug(f"{fields} {seen.message_id} {seen.send_timestamp} {seen.chat_type}")
