"""Every import path of published plugins resolves, and related paths to the same object."""

from __future__ import annotations

import copy
import importlib
import json
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
from loaded_plugins import unload_plugins
from waiting import WAIT_SECONDS

from nekro_agent import errors
from nekro_agent.api.schemas import AgentCtx
from nekro_agent.methods import SandboxMethodType

PATHS = {
    "nekro_agent.api": "core message schemas i18n timer recurring_timer signal plugin",
    "nekro_agent.api.plugin": (
        "NekroPlugin ConfigBase ExtraField SandboxMethodType SandboxMethod dynamic_import_pkg CmdCtl "
        "CommandPermission CommandExecutionContext CommandResponse Arg CommandGroup CommandOutputSegment "
        "CommandOutputSegmentType PluginStore TaskCtl TaskRunner TaskSignal AsyncTaskHandle task"
    ),
    "nekro_agent.services.plugin.base": (
        "NekroPlugin ConfigBase SandboxMethodType PluginConfigType CollectMethodsFunc PromptInjectMethod "
        "WebhookMethod PluginStore"
    ),
    "nekro_agent.services.plugin.schema": "SandboxMethod SandboxMethodType PromptInjectMethod WebhookMethod",
    "nekro_agent.services.plugin.packages": "dynamic_import_pkg",
    "nekro_agent.services.plugin.task": (
        "task TaskAPI TaskCtl TaskRunner AsyncTaskHandle AsyncTaskFunc TaskSignal"
    ),
    "nekro_agent.api.schemas": (
        "AgentCtx AgentMessageSegment AgentMessageSegmentType ChatMessage ChatType MessageContent "
        "WebhookRequest"
    ),
    "nekro_agent.api.user": "get_avatar",
    "nekro_agent.adapters.onebot_v11.tools.user": "get_avatar",
    "nekro_agent.adapters.onebot_v11.tools.onebot_util": (
        "get_chat_info get_chat_info_old get_message_reply_info"
    ),
    "nekro_agent.tools.onebot_util": "get_chat_info get_chat_info_old get_message_reply_info",
    "nekro_agent.core.tortoise_config": "resolve_db_url",
    "nekro_agent.services.memory.embedding_service": (
        "EmbeddingService embedding_service embed_text embed_batch get_memory_embedding_dimension "
        "get_memory_embedding_model_group"
    ),
    "nekro_agent.schemas.agent_ctx": "AgentCtx",
    "nekro_agent.schemas.chat_message": (
        "ChatMessage ChatType ChatMessageSegment ChatMessageSegmentType ChatMessageSegmentAt "
        "ChatMessageSegmentFile ChatMessageSegmentImage ChatMessageSegmentPoke ChatMessageSegmentForward "
        "ChatMessageSegmentJsonCard segment_from_dict segments_from_list"
    ),
    "nekro_agent.schemas.agent_message": "AgentMessageSegment AgentMessageSegmentType",
    "nekro_agent.schemas.signal": "MsgSignal",
    "nekro_agent.schemas.i18n": (
        "i18n_text get_text resolve_i18n t get_system_lang set_system_lang SupportedLang I18nDict"
    ),
    "nekro_agent.api.i18n": (
        "i18n_text get_text resolve_i18n t get_system_lang set_system_lang SupportedLang I18nDict"
    ),
    "nekro_agent.api.signal": "MsgSignal",
    "nekro_agent.api.core": (
        "logger config ModelConfigGroup CoreConfig get_sub_logger get_qdrant_client get_qdrant_config"
    ),
    "nekro_agent.core.vector_db": "get_qdrant_client get_qdrant_config QdrantConfig",
    "nekro_agent.core": "logger config",
    "nekro_agent.core.logger": "logger get_sub_logger",
    "nekro_agent.core.config": "config ModelConfigGroup USER_UPLOAD_DIR SANDBOX_SHARED_HOST_DIR",
    "nekro_agent.core.core_utils": "ExtraField ConfigBase",
    "nekro_agent.core.os_env": "OsEnv USER_UPLOAD_DIR SANDBOX_SHARED_HOST_DIR DATA_DIR",
    "nekro_agent.api.message": "send_text send_image send_file download_from_url push_system ChatMessage",
    "nekro_agent.services.message_service": "message_service MessageService",
    "nekro_agent.services.message": "message",
    "nekro_agent.services.message.message": "send_text send_file",
    "nekro_agent.services.message.message_service": "message_service",
    "nekro_agent.tools.path_convertor": (
        "convert_to_host_path convert_filename_to_access_path convert_filename_to_sandbox_upload_path "
        "convert_filename_to_sandbox_shared_path convert_filepath_to_sandbox_upload_path "
        "convert_filepath_to_sandbox_shared_path is_url_path get_upload_file_path sanitize_chat_key_for_path "
        "PathLocation convert_to_container_path convert_filename_to_container_path get_sandbox_path"
    ),
    "nekro_agent.tools.common_util": (
        "download_file download_file_from_base64 download_file_from_bytes limited_text_output "
        "calculate_text_similarity calculate_file_md5 copy_to_upload_dir"
    ),
    "nekro_agent.tools.message_id": "normalize_ref_msg_id",
    "nekro_agent.tools.at_markup": "neutralize_at_all_markup normalize_malformed_at_markup",
    "nekro_agent.tools.image_utils": "process_image_data_url",
    "nekro_agent.downloads.download": "fetch",
    "nekro_agent.services.agent.creator": "ContentSegment OpenAIChatMessage",
    "nekro_agent.services.agent.openai": "gen_openai_chat_response gen_openai_embeddings OpenAIResponse",
    "nekro_agent.models.db_chat_channel": "DBChatChannel ChannelStatus DefaultPreset",
    "nekro_agent.models.db_recurring_timer_job": "DBRecurringTimerJob",
    "nekro_agent.models.db_chat_message": "DBChatMessage",
    "nekro_agent.models.db_user": "DBUser",
    "nekro_agent.models.db_preset": "DBPreset",
    "nekro_agent.models.db_plugin_data": "DBPluginData",
    "nekro_agent.models": "DBChatChannel DBChatMessage DBPluginData DBPreset DBRecurringTimerJob DBUser",
    "nekro_agent.services.command": (
        "Arg CmdCtl CommandExecutionContext CommandGroup CommandPermission CommandResponse"
    ),
    "nekro_agent.services.command.group": "CommandGroup",
    "nekro_agent.services.command.base": (
        "BaseCommand CommandMetadata CommandPermission CommandExecutionContext"
    ),
    "nekro_agent.services.command.registry": "CommandRegistry command_registry",
    "nekro_agent.services.command.i18n_helper": "t",
    "nekro_agent.services.command.ctl": "CmdCtl",
    "nekro_agent.services.command.schemas": (
        "CommandExecutionContext CommandResponse CommandOutputSegment CommandOutputSegmentType Arg"
    ),
    "nekro_agent.services.timer": "timer_service",
    "nekro_agent.services.timer.timer_service": "timer_service TimerTask",
    "nekro_agent.services.user.deps": "get_current_user get_current_active_user get_current_super_user",
    "nekro_agent.services.user.perm": "require_role check_role Role",
    "nekro_agent.services.user.role": "Role get_perm_role",
    "nekro_agent.api.timer": "set_timer set_temp_timer clear_timers get_timers",
    "nekro_agent.api.recurring_timer": (
        "create_cron_job update_job get_job delete_job pause_job resume_job run_now list_jobs "
        "get_job_summary validate_timezone validate_cron_expr get_job_id"
    ),
}

#: Names without a counterpart; they import in plugins and raise when used.
PLACEHOLDERS = [
    "nekro_agent.api.context",
    "nekro_agent.services.plugin.collector.plugin_collector",
    "nekro_agent.adapters.onebot_v11.core.bot.get_bot", "nekro_agent.core.bot.get_bot",
    "nekro_agent.services.festival_service.festival_service", "nekro_agent.tools.image_utils.anything",
    "tortoise.Tortoise", "tortoise.expressions.Q",
]  # fmt: skip


@pytest.mark.parametrize("module", PATHS)
def test_every_name_is_found_at_its_path(module: str) -> None:
    names = PATHS[module].split()
    found = importlib.import_module(module)
    assert [name for name in names if not hasattr(found, name)] == []


def test_related_paths_lead_to_the_same_object() -> None:
    by_name: dict[str, set[int]] = {}
    for module, names in PATHS.items():
        for name in names.split():
            if name[0].isupper() and not name.isupper():
                by_name.setdefault(name, set()).add(id(getattr(importlib.import_module(module), name)))
    assert {name: ids for name, ids in by_name.items() if len(ids) > 1} == {}


def test_names_without_a_counterpart_import_in_plugins_and_raise_when_used(tmp_path: Path) -> None:
    split = [name.rpartition(".") for name in PLACEHOLDERS]
    imports = "\n".join(f"from {module} import {name} as p{i}" for i, (module, _, name) in enumerate(split))
    (tmp_path / "uses_all.py").write_text(
        f"{imports}\nfrom nekro_agent.api.plugin import NekroPlugin\n"
        "plugin = NekroPlugin('n', 'uses_all', '', '1', 'Ada', '')\n"
        f"names = [{', '.join(f'p{i}' for i in range(len(PLACEHOLDERS)))}]\n"
    )
    from nekro.plugins.loader import load_plugins

    loaded = load_plugins([tmp_path], shipped=False, entry_points=False)
    (record,) = loaded.records
    assert (record.status.value, record.error) == ("degraded", None)
    assert record.placeholders == sorted(PLACEHOLDERS)
    for value, name in zip(sys.modules[record.module].names, PLACEHOLDERS, strict=True):
        with pytest.raises(errors.PlaceholderUsedError, match=name):
            value.something() if not callable(value) else value()
    unload_plugins(loaded)


async def test_errors_of_the_reference_s_database_can_be_caught(tmp_path: Path) -> None:
    (tmp_path / "catches.py").write_text(
        "from tortoise.exceptions import DoesNotExist, IntegrityError, OperationalError\n"
        "from nekro_agent.api.plugin import NekroPlugin\n"
        "from nekro_agent.models.db_preset import DBPreset\n"
        "plugin = NekroPlugin('n', 'catches', '', '1', 'Ada', '')\n"
        "async def preset(number):\n"
        "    try:\n"
        "        return await DBPreset.get(id=number)\n"
        "    except (IntegrityError, OperationalError):\n"
        "        return 'fault'\n"
        "    except DoesNotExist:\n"
        "        return 'none'\n"
    )
    from nekro.plugins.loader import load_plugins
    from nekro_agent.testing import InMemoryRuntime

    loaded = load_plugins([tmp_path], shipped=False, entry_points=False)
    (record,) = loaded.records
    assert record.error is None
    async with InMemoryRuntime(loaded.plugins[0], data_dir=tmp_path / "data"):
        assert await sys.modules[record.module].preset(7) == "none"
    unload_plugins(loaded)


@pytest.mark.extended
def test_importing_the_sdk_imports_no_server_library() -> None:
    modules = " ".join(sorted(PATHS))
    code = (
        f"import importlib, sys, json\nfor m in {modules.split()!r}: importlib.import_module(m)\n"
        "print(json.dumps(sorted({m.partition('.')[0] for m in sys.modules})))"
    )
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=WAIT_SECONDS
    )
    tops = set(json.loads(out.stdout))
    assert tops.isdisjoint({"celery", "kombu", "redis", "sqlalchemy", "psycopg", "openai", "fastapi"})
    from nekro_agent.placeholders import OWN_PACKAGES

    assert tops & set(OWN_PACKAGES) == {"nekro_agent"}


def test_a_context_cannot_be_pickled() -> None:
    ctx = AgentCtx.for_call(chat_key="c:1", user_id="", container_key=None, call_id="x", round_id="r")
    assert (ctx.container_key, ctx.from_user_id, ctx.call_id, ctx.round_id) == (
        "sandbox_c%3A1",
        None,
        "x",
        "r",
    )
    with pytest.raises(errors.ResultError, match="AgentCtx cannot leave its process"):
        pickle.dumps(ctx)
    with pytest.raises(errors.ResultError):
        copy.copy(ctx).__reduce_ex__(4)
    v1 = AgentCtx(container_key="box", from_chat_key="c", extra_data={"a": 1})
    assert (v1.chat_key, v1.from_platform_userid, v1.extra_data) == ("c", None, {"a": 1})


def test_progress_reaches_its_listener() -> None:
    seen: list[tuple[float, str]] = []
    ctx = AgentCtx.for_call(chat_key="c", on_progress=lambda percent, text: seen.append((percent, text)))
    ctx.report_progress(50, "half")
    ctx.report_progress(500)
    AgentCtx.for_call(chat_key="c").report_progress(1)
    assert seen == [(50.0, "half"), (100.0, "")]


def test_method_types_equal_their_text() -> None:
    assert SandboxMethodType.TOOL == "tool" and SandboxMethodType("multimodal_agent").wakes_agent
