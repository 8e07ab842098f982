"""The API as published plugins use it, as data: parameters by name and position, fields, enum values.

This API may accept more than the tables contain, never less: a parameter that is positional there is
positional here, at the same position and with the same default.
"""

from __future__ import annotations

import ast
import enum
import importlib
import inspect
from typing import Any

import pytest
from pydantic import BaseModel

#: Owner (module, or module:class) → calls as plugins may write them; ``...`` is a default of any value.
CALLS = {
    "nekro_agent.api.plugin:NekroPlugin": [
        "__init__(self, name, module_name, description, version, author, url, support_adapter=None, "
        "is_builtin=False, is_package=False, i18n_name=None, i18n_description=None, allow_sleep=None, "
        "sleep_brief='', webui_path=None)",
        "mount_init_method(self)",
        "mount_cleanup_method(self)",
        "mount_config(self)",
        "get_config(self, config_class=...)",
        "save_config(self, config)",
        "get_plugin_path(self)",
        "get_plugin_data_dir(self)",
        "mount_router(self)",
        "mount_sandbox_method(self, method_type, name, description='')",
        "mount_prompt_inject_method(self, name, description='')",
        "mount_on_channel_reset(self)",
        "mount_on_user_message(self)",
        "mount_on_message(self)",
        "mount_on_system_message(self)",
        "mount_webhook_method(self, endpoint, name, description='')",
        "mount_async_task(self, task_type)",
        "on_enabled(self)",
        "on_disabled(self)",
        "mount_command(self, name, description, aliases=None, permission=..., usage='', category=..., "
        "tags=None, internal=False, i18n_description=None, i18n_usage=None, i18n_category=None)",
        "mount_command_group(self, name, description, permission=..., category=..., tags=None)",
        "mount_collect_methods(self)",
        "reset_methods(self)",
        "get_vector_collection_name(self, key='')",
        "get_docs(self)",
        "render_sandbox_methods_prompt(self, ctx)",
    ],
    "nekro_agent.api.plugin:PluginStore": [
        "get(self, chat_key='', user_key='', store_key='')",
        "set(self, chat_key='', user_key='', store_key='', value='')",
        "delete(self, chat_key='', user_key='', store_key='')",
    ],
    "nekro_agent.api.plugin:SandboxMethod": ["__init__(self, method_type, name, description, func)"],
    "nekro_agent.api.plugin": [
        "dynamic_import_pkg(package_spec, import_name=None, *, mirror=None, trusted_host=True, "
        "timeout=300, repo_dir=None)",
        "Arg(description, *, default=..., positional=False, greedy=False, choices=None, range=None, "
        "prompt_hint=...)",
    ],
    "nekro_agent.api.plugin:ConfigBase": [
        "load_config(file_path=...)",
        "dump_config(self, file_path=...)",
        "load_from_path(path)",
        "load_config_to_env(self)",
        "get_field_title(field_name)",
        "get_field_placeholder(field_name)",
    ],
    "nekro_agent.api.plugin:TaskCtl": [
        "report_progress(message, percent=0)",
        "success(message, data=None)",
        "fail(message, error=None)",
        "cancel(message)",
    ],
    "nekro_agent.api.plugin:AsyncTaskHandle": [
        "__init__(self, task_id, chat_key, plugin)",
        "wait(self, key, timeout=None)",
        "notify(self, key, data=None)",
        "cancel_wait(self, key)",
        "cancel_all(self)",
        "notify_agent(self, message, trigger=True)",
    ],
    "nekro_agent.api.plugin:TaskRunner": [
        "start(task_type, task_id, chat_key, plugin, *args, on_terminal=None, **kwargs)",
        "get_handle(task_type, task_id)",
        "get_state(task_type, task_id)",
        "is_running(task_type, task_id)",
        "cancel(task_type, task_id)",
        "stop_all()",
        "get_running_tasks()",
        "runner()",
    ],
    "nekro_agent.services.plugin.task:TaskAPI": [
        "start(task_type, task_id, chat_key, plugin, *args, on_terminal=None, **kwargs)",
        "get_handle(task_type, task_id)",
        "get_state(task_type, task_id)",
        "is_running(task_type, task_id)",
        "cancel(task_type, task_id)",
        "stop_all()",
        "get_running_tasks()",
        "runner()",
    ],
    "nekro_agent.api.plugin:CmdCtl": [
        "message(content)",
        "success(content)",
        "failed(content)",
        "wait(message, callback_cmd, options=None, timeout=..., on_timeout_message=..., context_data=None)",
    ],
    "nekro_agent.api.plugin:CommandGroup": ["command(self, name, description)"],
    "nekro_agent.api.schemas:AgentCtx": [
        "send_text(self, content, *, record=True)",
        "send_image(self, file_path, *, record=True)",
        "send_file(self, file_path, *, record=True)",
        "push_system(self, message, trigger_agent=False)",
        "get_core_config(self)",
        "get_bound_workspace(self)",
        "get_onebot_v11_bot(self)",
        "current_preset(self)",
        "get_preset_by_id(self, preset_id)",
        "get_effective_preset_by_id(self, preset_id)",
        "set_preset(self, preset_id)",
        "create_by_chat_key(chat_key, container_key=None, from_chat_key=None, webhook_request=None)",
        "create_by_db_chat_channel(db_chat_channel, container_key=None, from_chat_key=None, "
        "webhook_request=None)",
        "create_by_webhook(webhook_request)",
    ],
    "nekro_agent.files.file_system:FileSystem": [
        "get_file(self, path)",
        "forward_file(self, host_path)",
        "mixed_forward_file(self, file, file_name='')",
    ],
    "nekro_agent.core.logger": ["get_sub_logger(name, **bind)"],
    "nekro_agent.core.config:CoreConfig": ["get_model_group_info(self, model_name)"],
    "nekro_agent.api.message": [
        "send_text(chat_key, message, ctx, *, record=True, ref_msg_id=None)",
        "send_image(chat_key, image_path, ctx, *, record=True, ref_msg_id=None)",
        "send_file(chat_key, file_path, ctx, *, record=True, ref_msg_id=None, filename=None)",
        "push_system(chat_key, message, ctx=None, trigger_agent=False)",
        "download_from_url(url, ctx)",
    ],
    "nekro_agent.services.message_service:MessageService": [
        "push_system_message(self, chat_key, agent_messages, trigger_agent=False, db_chat_channel=None)",
        "push_bot_message(self, chat_key, agent_messages, plt_response=None, db_chat_channel=None, "
        "ref_msg_id=None, normalize_at_markup=True)",
        "push_human_message(self, message, user=None, trigger_agent=False, db_chat_channel=None)",
        "schedule_agent_task(self, chat_key)",
    ],
    "nekro_agent.tools.path_convertor": [
        "convert_to_host_path(sandbox_path, chat_key, container_key=None, uploads_dir=..., shared_dir=...)",
        "convert_filename_to_access_path(filename, chat_key)",
        "convert_filename_to_sandbox_upload_path(filename)",
        "convert_filename_to_sandbox_shared_path(filename)",
        "convert_filepath_to_sandbox_upload_path(filepath)",
        "convert_filepath_to_sandbox_shared_path(filepath)",
        "is_url_path(path)",
        "sanitize_chat_key_for_path(chat_key)",
        "convert_to_container_path(path)",
        "convert_filename_to_container_path(filename)",
    ],
    "nekro_agent.services.agent.creator:ContentSegment": [
        "text_content(text)",
        "image_content(image_url)",
        "image_content_from_bytes(image_bytes, image_type)",
        "image_content_from_path(image_path)",
    ],
    "nekro_agent.services.agent.creator:OpenAIChatMessage": [
        "__init__(self, role, content)",
        "from_text(role, text)",
        "create_empty(role)",
        "add(self, segment)",
        "batch_add(self, segments)",
        "extend(self, message)",
        "tidy(self)",
        "to_dict(self)",
    ],
    "nekro_agent.api.timer": [
        "set_timer(chat_key, trigger_time, event_desc)",
        "set_temp_timer(chat_key, trigger_time, event_desc)",
        "clear_timers(chat_key, temporary=None)",
        "get_timers(chat_key)",
    ],
    "nekro_agent.api.recurring_timer": [
        "create_cron_job(chat_key, cron_expr, event_desc, timezone, workday_mode='none', title=None)",
        "update_job(job_id)",
        "get_job(job_id)",
        "delete_job(job_id)",
        "pause_job(job_id)",
        "resume_job(job_id)",
        "run_now(job_id)",
        "list_jobs(chat_key)",
        "get_job_summary(chat_key)",
        "validate_timezone(timezone)",
        "validate_cron_expr(cron_expr)",
    ],
    "nekro_agent.services.timer.timer_service:TimerService": [
        "set_timer(self, chat_key, trigger_time, event_desc, silent=False, override=False, temporary=..., "
        "callback=None)",
        "get_timers(self, chat_key)",
        "delete_timer_by_id(self, task_id)",
    ],
    "nekro_agent.api.i18n": [
        "i18n_text(*, zh_CN, en_US)",
        "get_text(i18n_dict, default=..., lang=...)",
        "resolve_i18n(text)",
        "t(*, zh_CN, en_US)",
        "get_system_lang()",
        "set_system_lang(lang)",
    ],
    "nekro_agent.schemas.i18n:SupportedLang": ["from_accept_language(accept_lang)"],
    "nekro_agent.schemas.chat_message:ChatMessageSegmentFile": [
        "get_segment_type()",
        "create_from_url(url, from_chat_key, file_name='', use_suffix='')",
        "create_from_bytes(_bytes, from_chat_key, file_name='', use_suffix='')",
        "create_from_base64(base64_str, from_chat_key, file_name='', use_suffix='')",
        "create_from_local_path(local_path, from_chat_key, file_name='', use_suffix='')",
        "create_form_local_path(local_path, from_chat_key, file_name='', use_suffix='')",
    ],
    "nekro_agent.services.plugin.schema:WebhookMethod": ["__init__(self, name, description, func)"],
    "nekro_agent.services.plugin.schema:PromptInjectMethod": ["__init__(self, name, description, func)"],
    "nekro_agent.services.command.base:BaseCommand": [
        "execute(self, context, **kwargs)",
        "check_permission(self, context)",
    ],
    "nekro_agent.services.command.registry:CommandRegistry": ["register(self, command)"],
    "nekro_agent.services.memory.embedding_service:EmbeddingService": [
        "__init__(self, model_group=None, dimension=None, timeout=...)",
        "embed_text(self, text)",
        "embed_batch(self, texts, batch_size=10)",
        "compute_similarity(self, text1, text2)",
    ],
    "nekro_agent.services.memory.embedding_service": [
        "get_memory_embedding_dimension()",
        "get_memory_embedding_model_group()",
        "embed_text(text)",
        "embed_batch(texts)",
    ],
    "nekro_agent.adapters.onebot_v11.tools.user": ["get_avatar(user_qq, ctx)"],
    "nekro_agent.adapters.onebot_v11.tools.onebot_util": ["get_chat_info(event)", "get_chat_info_old(event)"],
    "nekro_agent.core.tortoise_config": ["resolve_db_url()"],
    "nekro_agent.tools.common_util": [
        "download_file(url, file_path=..., file_name='', use_suffix='', retry_count=3, from_chat_key='')",
        "download_file_from_bytes(bytes_data, file_path=..., file_name='', use_suffix='', from_chat_key='')",
        "download_file_from_base64(base64_str, file_path=..., file_name='', use_suffix='', from_chat_key='')",
        "copy_to_upload_dir(file_path, file_name='', use_suffix='', from_chat_key='')",
    ],
    "nekro_agent.models.db_chat_channel:DBChatChannel": ["get_channel(chat_key)", "get_preset(self)"],
}

#: Attributes that plugins read of given objects; ``=value`` where the default matters.
FIELDS = {
    "nekro_agent.api.schemas:AgentCtx": "container_key from_chat_key webhook_request channel_id "
    "channel_name channel_type adapter_key extra_data",
    "nekro_agent.schemas.chat_message:ChatMessage": "chat_key sender_id sender_name sender_nickname "
    "platform_userid content_text content_data is_tome message_id send_timestamp chat_type",
    "nekro_agent.api.plugin:ExtraField": "is_hidden is_secret placeholder is_textarea ref_model_groups "
    "ref_email_accounts_send_enabled model_type required overridable sub_item_name load_to_sysenv "
    "load_sysenv_as load_to_nonebot_env load_nbenv_as is_need_restart ref_presets ref_presets_no_default "
    "ref_presets_multiple i18n_category i18n_title i18n_description",
    "nekro_agent.api.plugin:CommandExecutionContext": "user_id chat_key username adapter_key is_super_user "
    "is_advanced_user lang",
    "nekro_agent.api.plugin:CommandOutputSegment": "type text file_path file_name mime_type web_url",
    "nekro_agent.api.plugin:CommandResponse": "status message data output_segments callback_cmd "
    "wait_options wait_timeout on_timeout_message context_data",
    "nekro_agent.api.plugin:TaskCtl": "signal message data progress",
}

ENUMS = {
    "nekro_agent.api.plugin:SandboxMethodType": {
        "TOOL": "tool", "AGENT": "agent", "BEHAVIOR": "behavior", "MULTIMODAL_AGENT": "multimodal_agent"
    },
    "nekro_agent.api.signal:MsgSignal": {
        "FORCE_TRIGGER": -1, "CONTINUE": 0, "BLOCK_TRIGGER": 1, "BLOCK_ALL": 2
    },
    "nekro_agent.tools.path_convertor:PathLocation": {"UPLOADS": "uploads", "SHARED": "shared"},
    "nekro_agent.api.plugin:TaskSignal": {
        "PROGRESS": "progress", "SUCCESS": "success", "FAIL": "fail", "CANCEL": "cancel"
    },
    "nekro_agent.api.plugin:CommandOutputSegmentType": {"TEXT": "text", "IMAGE": "image", "FILE": "file"},
}  # fmt: skip


def owner_of(path: str) -> Any:
    module, _, name = path.partition(":")
    found = importlib.import_module(module)
    return getattr(found, name) if name else found


def documented(call: str) -> tuple[str, list[tuple[str, bool, object]]]:
    """Return the function's name and its parameters as (name, keyword only, default)."""
    function = ast.parse(f"def {call}: ...").body[0]
    assert isinstance(function, ast.FunctionDef)
    given = function.args
    places = [argument.arg for argument in given.args]
    defaults = [inspect.Parameter.empty] * (len(places) - len(given.defaults))
    values = [*defaults, *(ast.literal_eval(default) for default in given.defaults)]
    parameters = [(name, False, value) for name, value in zip(places, values, strict=True)]
    for argument, default in zip(given.kwonlyargs, given.kw_defaults, strict=True):
        value = inspect.Parameter.empty if default is None else ast.literal_eval(default)
        parameters.append((argument.arg, True, value))
    return function.name, parameters


@pytest.mark.parametrize(
    ("owner", "call"), [(owner, call) for owner, calls in CALLS.items() for call in calls]
)
def test_every_call_of_plugins_is_accepted(owner: str, call: str) -> None:
    name, parameters = documented(call)
    actual = inspect.signature(getattr(owner_of(owner), name)).parameters
    places = [p for p in actual.values() if p.kind is not inspect.Parameter.KEYWORD_ONLY]
    for index, (parameter, keyword_only, default) in enumerate(parameters):
        assert parameter in actual, f"{name} lacks {parameter}: {list(actual)}"
        ours = actual[parameter]
        if not keyword_only:
            assert places[index].name == parameter, f"{parameter} is not at place {index}"
        if default is inspect.Parameter.empty:
            continue
        assert ours.default is not inspect.Parameter.empty, f"{parameter} is required here"
        assert default is ... or ours.default == default, f"{parameter}={ours.default!r}"
    wanted = {parameter for parameter, _, _ in parameters}
    more = [p for p in actual.values() if p.name not in wanted and p.default is inspect.Parameter.empty]
    assert [p.name for p in more if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)] == []


@pytest.mark.parametrize("owner", FIELDS)
def test_fields_that_plugins_read_exist(owner: str) -> None:
    model = owner_of(owner)
    assert issubclass(model, BaseModel)
    assert [name for name in FIELDS[owner].split() if name not in model.model_fields] == []


@pytest.mark.parametrize("owner", ENUMS)
def test_enum_members_have_the_values_that_plugins_compare_with(owner: str) -> None:
    kind = owner_of(owner)
    assert issubclass(kind, enum.Enum)
    assert {name: kind[name].value for name in ENUMS[owner]} == ENUMS[owner]
