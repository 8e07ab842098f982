"""Plugins in the style of published ones: each loads unmodified and works."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from plugin_world import CHAT, USER, FileServer, MemoryWorld, World, uploads_dir
from queue_world import QueueSystem

from nekro.cli.environment import environment_of
from nekro.plugins.commands import CommandTable
from nekro.plugins.loader import PluginStatus
from nekro_agent.commands.schemas import CommandExecutionContext, CommandResponse
from nekro_agent.errors import InvalidValueError, PlaceholderUsedError, ResultError
from nekro_agent.ports import MessageKind
from nekro_agent.schemas.agent_ctx import AgentCtx, WebhookRequest
from nekro_agent.schemas.chat_message import ChatMessage
from nekro_agent.schemas.signal import MsgSignal

pytestmark = pytest.mark.extended


def module_of(world: MemoryWorld, key: str) -> Any:
    record = next(record for record in world.loaded.records if record.key == key)
    return next(m for m in list(sys.modules.values()) if getattr(m, "__file__", "") == record.path)


DEGRADED = {"Ada.degraded", "Ada.group_diary"}


async def test_every_plugin_loads_and_those_with_missing_parts_are_degraded(authored: MemoryWorld) -> None:
    statuses = {record.key: record.status for record in authored.loaded.records}
    assert len(statuses) == len(authored.loaded.records) >= 24
    assert {key for key, status in statuses.items() if status is PluginStatus.DEGRADED} == DEGRADED
    assert set(statuses.values()) == {PluginStatus.OK, PluginStatus.DEGRADED}, authored.loaded.records
    assert authored.runtime.failures == []


def test_the_command_line_lists_plugins_as_the_workers_load_them(authored_system: QueueSystem) -> None:
    """One worker process has loaded them all and run their init hooks; `nekro plugins` agrees with it."""
    done = subprocess.run(
        [sys.executable, "-P", "-m", "nekro.cli.main", "plugins", "--json"],
        env=environment_of(authored_system.settings),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    statuses = {plugin["key"]: plugin["status"] for plugin in json.loads(done.stdout)}
    assert len(statuses) >= 24 and {key for key in statuses if statuses[key] != "ok"} == DEGRADED
    log = authored_system.log
    assert "plugin_hook_failed" not in log and "plugin_not_loaded" not in log


async def test_bytes_and_containers_arrive_unchanged(anywhere: World) -> None:
    files = {"b": b"\x00\xff", "a": b""}
    digests = (await anywhere.call("digest_files", files)).value
    assert [d["name"] for d in digests] == ["a", "b"]
    assert digests[1]["sha256"] == hashlib.sha256(b"\x00\xff").hexdigest()
    joined = await anywhere.call("join_bytes", [b"1", b"2"], how="re.versed", separator=b"-")
    assert joined.value == b"2-1"
    assert anywhere.registry.find("join_bytes").signature == (
        "(parts: List[bytes], how: Literal['plain', 're.versed'] = 'plain', **options: Any) -> bytes"
    )


async def test_untyped_results_become_texts(anywhere: World) -> None:
    assert (await anywhere.call("agent_dict", "q")).text == "{'query': 'q', 'hits': 2}"
    behavior = await anywhere.call("behavior_bool", True)
    assert (behavior.value, behavior.text) == (False, "False")
    assert (await anywhere.call("behavior_none")).text == "None"
    assert await anywhere.texts(CHAT, MessageKind.SYSTEM) == ["{'query': 'q', 'hits': 2}", "False", "None"]
    assert await anywhere.woken(CHAT) == 1


async def test_all_shapes_of_multimodal_results_are_accepted(anywhere: World) -> None:
    message = (await anywhere.call("multimodal_message")).segments
    assert message is not None
    assert [part["type"] for part in message] == ["text", "image_url"]
    assert (await anywhere.call("multimodal_part")).segments == [{"type": "text", "text": "only text"}]
    with pytest.raises(ResultError, match=r"multimodal_number must return content parts.*returned int"):
        await anywhere.call("multimodal_number")


async def test_a_context_as_second_parameter_can_be_passed_both_ways(anywhere: World) -> None:
    assert (await anywhere.call("run_console", "ls")).value == f"ls in {CHAT}"
    assert (await anywhere.call("run_console", command="ls")).value == f"ls in {CHAT}"
    assert anywhere.registry.find("run_console").signature == "(command: str) -> str"
    assert (await anywhere.call("other_name", 7)).value == f"{CHAT}:7"


async def test_ordinary_functions_do_not_block_the_event_loop(
    anywhere: World, file_server: FileServer
) -> None:
    slow = asyncio.create_task(anywhere.call("slow_thread_name", 0.2))
    await asyncio.sleep(0)
    assert (await anywhere.call("other_name", 1)).value and not slow.done()
    assert (await slow).value != "MainThread"
    url = file_server.add("/page", b"x")
    assert (await anywhere.call("fetch_status", url)).value == 200


async def test_module_state_persists_between_calls(anywhere: World) -> None:
    assert (await anywhere.call("send_once", "a")).value is True
    assert (await anywhere.call("send_once", "a")).value is False
    await asyncio.gather(*(anywhere.call("roll") for _ in range(20)))
    assert (await anywhere.call("announce_roll")).text == "announced 22"
    assert await anywhere.texts(CHAT, MessageKind.ASSISTANT) == ["a", "rolled 22"]


async def test_a_background_loop_keeps_running_between_calls(anywhere: World) -> None:
    first = (await anywhere.call("wait_for_tick")).value
    assert (await anywhere.call("wait_for_tick")).value > first
    await anywhere.stop()
    assert await anywhere.stored("Ada.background_loop", "stopped_after") == "True"


async def test_packages_of_the_environment_are_available_at_import(anywhere: World) -> None:
    answer = (await anywhere.call("parse_yaml", "a: 1")).value
    assert answer == {"content": {"a": 1}, "client": "httpx"}


async def test_the_data_directory_exists_at_import(anywhere: World) -> None:
    places = (await anywhere.call("where")).value
    assert places["root"] == str(anywhere.data_dir)
    assert Path(places["state"]).parent == Path(places["same"])
    assert places["same"] == str(anywhere.data_dir / "plugins" / "Ada.path_at_import")


async def test_a_byte_order_mark_is_accepted(anywhere: World) -> None:
    assert (await anywhere.call("greet_bom", "世界")).value == "你好，世界"
    assert (await anywhere.call("问候", "世界")).value == "你好，世界"


async def test_a_method_without_docstring_is_callable(anywhere: World) -> None:
    assert (await anywhere.call("undocumented", 4)).value == 8
    assert anywhere.registry.find("undocumented").doc is None


async def test_unknown_constructor_arguments_are_ignored(anywhere: World) -> None:
    answer = (await anywhere.call("identity")).value
    assert answer == ["Ada.unknown_keywords", "1.0", "https://example.com", True, []]


async def test_configuration_is_one_object_and_a_file(anywhere: World) -> None:
    file = anywhere.data_dir / "configs" / "Ada.configured.yaml"
    assert (await anywhere.call("show_config")).value == {"limit": 3, "names": ["a"], "same": True}
    assert (await anywhere.call("raise_limit")).text == "4"
    assert "LIMIT: 4" in file.read_text("utf-8")
    file.write_text("LIMIT: 9\nNAMES: [x, y]\n", "utf-8")  # as another process would save it
    assert (await anywhere.call("show_config")).value == {"limit": 9, "names": ["x", "y"], "same": True}
    file.write_text("LIMIT: 0\n", "utf-8")
    assert (await anywhere.call("show_config")).value["limit"] == 9
    file.write_text("LIMIT: [\n", "utf-8")
    assert (await anywhere.call("show_config")).value["limit"] == 9


async def test_message_hooks_decide_and_prompts_are_injected(authored: MemoryWorld) -> None:
    host = authored.runtime.host
    ctx = AgentCtx.for_call(chat_key=CHAT, user_id=USER, adapter_key="other")

    async def say(text: str) -> MsgSignal:
        return await host.user_message(ctx, ChatMessage(chat_key=CHAT, content_text=text))

    assert await say("hello") is MsgSignal.CONTINUE
    assert await say("wake up") is MsgSignal.FORCE_TRIGGER
    assert await say("spam, wake up") is MsgSignal.BLOCK_ALL
    prompts = [await host.inject(plugin, ctx) for plugin in host.plugins if plugin.serves(ctx.adapter_key)]
    assert [text for text in prompts if text] == [f"The last message was {USER}: spam, wake up."]
    await authored.call("push", "noise here")
    await authored.call("push", "signal", wake=True)
    assert await authored.texts(CHAT, MessageKind.SYSTEM) == ["signal"]
    assert await authored.woken(CHAT) == 1
    await authored.reset(CHAT)
    assert await authored.stored("Ada.message_hooks", "last", chat_key=CHAT) is None


async def test_hooks_see_the_texts_of_methods_and_may_drop_the_record_not_the_round(anywhere: World) -> None:
    for method in ("note_down", "study"):
        for text in ("noise of a method", f"signal of {method}"):
            outcome = await anywhere.call(method, text)
            assert outcome.text == text  # the caller gets it nevertheless
    assert await anywhere.texts(CHAT, MessageKind.SYSTEM) == ["signal of note_down", "signal of study"]
    assert await anywhere.woken(CHAT) == 2


async def test_content_parts_wake_the_agent_and_are_not_recorded(anywhere: World) -> None:
    await anywhere.call("multimodal_message")
    assert await anywhere.texts(CHAT, MessageKind.SYSTEM) == []
    assert await anywhere.woken(CHAT) == 1


def context(**values: Any) -> CommandExecutionContext:
    return CommandExecutionContext(**{"user_id": "u", "username": "Bob", "chat_key": CHAT, **values})


async def answers(
    world: World, line: str, who: CommandExecutionContext | None = None
) -> list[CommandResponse]:
    return await world.command(line, who or context())


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("/weather Tokyo", "Tokyo 1 C for Bob"),
        ("/weather city:Tokyo days:3 unit:F", "Tokyo 3 F for Bob"),
        ('/天气 city:"New York" days:"2"', "New York 2 C for Bob"),
        ("/Ada.with_commands:weather 'Los \\'A'", "Los 'A 1 C for Bob"),
        ("/weather http://x", "http://x 1 C for Bob"),
        ("/say  it is   'quoted' key:value ", "it is   'quoted' key:value"),
        ("/answer choice:4", "5"),
    ],
)
async def test_command_lines_are_parsed(anywhere: World, line: str, message: str) -> None:
    (response,) = await answers(anywhere, line)
    assert (response.status.value, response.message) == ("success", message)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("/weather", "city (city) is missing"),
        ("/weather Tokyo days:9", "days must lie between 1 and 7"),
        ("/weather Tokyo days:many", "days: 'many'"),
        ("/weather Tokyo unit:K", "unit must be one of C, F"),
        ("/weather Tokyo Osaka", "unexpected 'Osaka'"),
        ("/wether Tokyo", "did you mean weather"),
        ("/rebuild", "needs the permission super_user"),
        ("/cfg.set a 1", "needs the permission advanced"),
        ("/broken", "RuntimeError: out of order"),
    ],
)
async def test_mistakes_in_commands_are_answered_with_an_explanation(
    anywhere: World, line: str, reason: str
) -> None:
    (response,) = await answers(anywhere, line)
    assert response.status.value == "error"
    assert reason in response.message


async def test_commands_answer_in_steps_ask_questions_and_form_groups(anywhere: World) -> None:
    steps = await answers(anywhere, "/rebuild", context(is_super_user=True))
    assert [step.message for step in steps] == ["started", "done"]
    (file,) = steps[1].output_segments or ()
    assert file.type.value == "file" and Path(file.file_path or "").name == "report"
    (question,) = await answers(anywhere, "/ask")
    assert (question.status.value, question.callback_cmd, question.wait_timeout) == ("waiting", "answer", 30)
    (stored,) = await answers(anywhere, "/cfg.put volume 0.5", context(is_advanced_user=True))
    assert stored.message == "volume = 0.5"
    assert await anywhere.stored("Ada.with_commands", "volume") == "0.5"
    listed = {entry.command.name for entry in CommandTable(anywhere.loaded.plugins)}
    assert "answer" not in listed and {"weather", "cfg.set"} <= listed


async def test_a_question_is_answered_once_and_by_the_asked_user_only(on_queue: World) -> None:
    await answers(on_queue, "/ask")
    for stranger in (context(user_id="v"), context(chat_key="elsewhere")):
        with pytest.raises(InvalidValueError, match="no command waits for an answer"):
            await answers(on_queue, "4", stranger)
    assert [response.message for response in await answers(on_queue, "4")] == ["5"]
    with pytest.raises(InvalidValueError, match="with a slash: '/4'"):
        await answers(on_queue, "4")
    await answers(on_queue, "/ask")
    await answers(on_queue, "/say never mind")
    with pytest.raises(InvalidValueError, match="no command waits for an answer"):
        await answers(on_queue, "4")


async def test_data_of_a_question_reaches_the_answer_within_its_time_only(on_queue: World) -> None:
    await answers(on_queue, "/order tea")
    assert [response.message for response in await answers(on_queue, "two cups")] == ["tea: two cups"]
    await answers(on_queue, "/order coffee timeout:0.000001")
    (late,) = await answers(on_queue, "three cups")
    assert (late.status.value, late.message) == ("error", "the kitchen is closed")


async def test_a_command_runs_in_a_worker_of_its_plugin(on_queue: World) -> None:
    """Init and module state belong to a worker, not to the requesting process."""
    first, second = [(await answers(on_queue, "/visits"))[0].data for _ in range(2)]
    assert second == {"visits": first["visits"] + 1, "process": first["process"]}
    assert first["process"] != os.getpid()


async def test_attachments_that_only_the_worker_can_hold_arrive_as_text(
    on_queue: World,
) -> None:
    (response,) = await answers(on_queue, "/attach")
    assert response.message == "done"
    assert isinstance(response.data, str) and "Box object" in response.data


async def test_a_job_reports_waits_and_succeeds(authored: MemoryWorld) -> None:
    await authored.call("start_render", "film", frames=3)
    with pytest.raises(InvalidValueError, match="running already"):
        await authored.call("start_render", "film")
    assert (await authored.call("job_state", "film")).value["running"] is True
    assert (await authored.call("approve", "film", "good")).value is True  # before the job waits for it
    await authored.runtime.jobs.settled()
    state = (await authored.call("job_state", "film")).value
    assert state == {
        "running": False,
        "signal": "success",
        "message": "rendered",
        "data": {"frames": 3, "verdict": "good"},
    }
    assert "render film: good" in await authored.texts(CHAT, MessageKind.SYSTEM)
    assert await authored.woken(CHAT) == 1
    assert module_of(authored, "Ada.with_jobs").ENDED == ["rendered"]


@pytest.mark.parametrize(
    ("ending", "message"),
    [
        ("fail", "no film"),
        ("raise", "RuntimeError: projector broke"),
        ("stop", "the task ended without TaskCtl.success, fail or cancel"),
    ],
)
async def test_an_unsuccessful_job_reports_the_reason(
    authored: MemoryWorld, ending: str, message: str
) -> None:
    await authored.call("start_render", "film", 1, ending)
    await authored.call("approve", "film", "go")
    await authored.runtime.jobs.settled()
    state = (await authored.call("job_state", "film")).value
    assert (state["signal"], state["message"]) == ("fail", message)


async def test_a_job_is_cancelled_once(authored: MemoryWorld) -> None:
    await authored.call("start_render", "film")
    assert (await authored.call("cancel_render", "film")).value is True
    await authored.runtime.jobs.settled()
    assert (await authored.call("cancel_render", "film")).value is False
    assert (await authored.call("job_state", "film")).value["signal"] == "cancel"
    assert (await authored.call("approve", "film", "late")).value is False


async def test_timers_fire_once_and_the_temporary_one_is_replaced(authored: MemoryWorld) -> None:
    assert (await authored.call("remind", 60, "first")).value is True
    assert (await authored.call("remind", 30, "check", temporary=True)).value is True
    assert (await authored.call("remind", 40, "check again", temporary=True)).value is True
    assert (await authored.call("remind", -5, "past")).value is False
    assert (await authored.call("reminders")).value == ["check again", "first"]
    later = datetime.now(UTC) + timedelta(seconds=61)
    assert await authored.runtime.timers.fire_due(later) == 2
    assert await authored.runtime.timers.fire_due(later) == 0
    assert await authored.texts(CHAT, MessageKind.SYSTEM) == ["check again", "first"]
    assert await authored.woken(CHAT) == 2


async def test_a_recurring_timer_needs_a_valid_expression_and_zone(anywhere: World) -> None:
    job_id = (await anywhere.call("daily", "0 9 * * *", "morning")).value
    assert 4 <= len(job_id) <= 12 and job_id.isalnum()
    with pytest.raises(InvalidValueError, match="is not valid: minute, hour"):
        await anywhere.call("daily", "0 9 * *", "x")
    with pytest.raises(InvalidValueError, match="'Mars/Base' does not exist"):
        await anywhere.call("daily", "0 9 * * *", "x", zone="Mars/Base")


async def test_missing_parts_are_named_and_the_rest_works(anywhere: World) -> None:
    record = next(r for r in anywhere.loaded.records if r.key == "Ada.degraded")
    assert "nekro_agent.services.workspace.manager.WorkspaceService" in record.placeholders
    (lost,) = (name for name in record.placeholders if "something_new" in name)
    where = "degraded.py, line 14: No module named 'nekro_agent.tools.something_new'"
    assert lost == f"without nekro_agent.tools.something_new ({where})"
    assert (await anywhere.call("fine")).value == "fine, better=None"
    for method, name in [
        ("open_workspace", "nekro_agent.services.workspace.manager.WorkspaceService"),
        ("make_mine", "nekro_agent.services.workspace.models.BaseWorkspace"),
    ]:
        with pytest.raises(PlaceholderUsedError, match=name):
            await anywhere.call(method)


async def test_older_import_paths_lead_to_the_same_objects(anywhere: World) -> None:
    answer = (await anywhere.call("legacy_summary", "a/b.txt")).value
    assert answer == ["/app/uploads/b.txt", True, "xxxx...xxx", True, "yes", None]
    assert await anywhere.texts(CHAT, MessageKind.SYSTEM) == ["noted"]


async def test_routers_and_webhooks_are_collected_and_switches_run(authored: MemoryWorld) -> None:
    plugin = next(p for p in authored.loaded.plugins if p.key == "Ada.web_parts")
    make_router = plugin.hook("router")
    assert make_router is not None
    assert [route.path for route in make_router().routes] == ["/status"]
    ctx = await AgentCtx.create_by_webhook(WebhookRequest(body={"ref": "main"}))
    assert await plugin.webhook_methods["push"].func(ctx) == "main"
    with pytest.raises(InvalidValueError, match="belongs to no chat"):
        _ = ctx.chat_key
    failures = await authored.runtime.host.set_enabled(plugin.key, False)
    assert [failure.error for failure in failures] == ["RuntimeError: no"]
    await authored.runtime.host.set_enabled(plugin.key, True)
    assert module_of(authored, "Ada.web_parts").SWITCHES == ["off", "on"]


async def test_all_source_layouts_are_found(anywhere: World) -> None:
    assert (await anywhere.call("doubled", 4)).value == 8
    assert (await anywhere.call("report")).value == "Kyoto: sunny"


async def test_a_dice_table_of_an_older_api_works(anywhere: World) -> None:
    rolled = await anywhere.call("roll_dice", "3d6+1", reason="luck", seed=7)
    total = (await anywhere.call("last_roll_total")).value
    assert f"'total': {total}" in (rolled.text or "") and 4 <= total <= 19
    assert (await anywhere.call("last_roll_total", chat_key="elsewhere")).value is None
    assert "at most 20 dice" in ((await anywhere.call("roll_dice", "99d6")).text or "")
    with pytest.raises(Exception, match="bad dice expression: 3x6"):
        await anywhere.call("roll_dice", "3x6")

    created = await anywhere.call("save_card", "阿尔", {"力量": 60}, tags=["精灵"])
    assert (created.value, created.text) == (True, "True")
    assert (await anywhere.call("save_card", "阿尔", {"力量": 61})).value is False
    card = (await anywhere.call("Ada.trpg_table.show_card", name="阿尔")).value
    assert card == {"stats": {"力量": 61}, "tags": [], "owner": USER}
    await anywhere.reset(CHAT)
    assert await anywhere.stored("Ada.trpg_table", "cards", chat_key=CHAT) is None
    assert anywhere.registry.find("掷骰").task == "Ada.trpg_table.roll_dice"


async def test_a_handler_knows_its_message_and_its_chat(anywhere: World) -> None:
    who = context(user_id="42", chat_key="onebot_v11-group_7")
    answered = [(await answers(anywhere, "/diary_last", who))[0].message for _ in range(2)]
    assert answered == ["onebot_v11-group_7 group group_7_42"] * 2


async def test_a_wrapper_of_the_recording_of_messages_sees_those_of_all_plugins(anywhere: World) -> None:
    await anywhere.call("send_once", "from another plugin")
    seen = (await anywhere.call("seen_messages")).value
    assert seen == [[CHAT, "text", "from another plugin"]]
    assert await anywhere.texts(CHAT, MessageKind.ASSISTANT) == ["from another plugin"]


async def test_commands_that_are_objects_run_in_their_plugin(anywhere: World) -> None:
    assert [one.message for one in await answers(anywhere, "/watched 2")] == ["messages: 2"]
    assert [one.message for one in await answers(anywhere, "/watched_late")] == ["registered in the init"]


async def test_a_diary_for_an_unavailable_platform_works_without_its_bot(anywhere: World) -> None:
    record = next(r for r in anywhere.loaded.records if r.key == "Ada.group_diary")
    assert record.status is PluginStatus.DEGRADED
    assert "nonebot.on_notice" in record.placeholders
    counts = [(await anywhere.call("write_diary", f"line {n}")).value for n in range(2)]
    assert counts[1] == counts[0] + 1
    file = anywhere.data_dir / "plugins" / "Ada.group_diary" / f"{CHAT}.txt"
    assert [line.split("\t")[1] for line in file.read_text("utf-8").splitlines()] == ["line 0", "line 1"]

    assert (await anywhere.call("notify_chat", "早上好", wake=True)).text == "sent"
    assert await anywhere.texts(CHAT, MessageKind.ASSISTANT) == ["早上好"]
    assert await anywhere.woken(CHAT) == 1
    summary = (await anywhere.call("summarize_chat")).text or ""
    assert summary.splitlines()[0] == f"{CHAT} said 3 things:"
    assert "-1: 早上好" in summary and "SYSTEM: [diary] 早上好" in summary
    assert (await anywhere.call("remind_diary", 60, "tea")).value == ["tea", "tea again"]
    with pytest.raises(PlaceholderUsedError, match="get_bot"):
        await anywhere.call("group_members")
    (answer,) = await answers(anywhere, "/日记数 1000")
    assert answer.message == "1000"


async def test_a_sketchbook_draws_shows_and_sends(anywhere: World, file_server: FileServer) -> None:
    file_server.add("/draw?prompt=cat&size=64x64", b"\x89PNG cat", content_type="image/png")
    assert (await anywhere.call("set_draw_service", file_server.base)).value == file_server.base
    path = (await anywhere.call("draw", "cat", size="64x64")).value
    assert path == "/app/uploads/sketch.png"
    assert (uploads_dir(anywhere) / "sketch.png").read_bytes() == b"\x89PNG cat"
    shown = (await anywhere.call("look_at", path)).segments or []
    assert [part["type"] for part in shown] == ["text", "image_url"]
    assert shown[1]["image_url"]["url"].startswith("data:image/png;base64,")

    shared = await anywhere.shared_dir()
    (shared / "photo.jpg").write_bytes(b"photo")
    sent = await anywhere.call("convert_and_send", "/app/shared/photo.jpg")
    assert sent.text == "sent /app/uploads/thumb.png, mode plain"
    assert sorted(p.name for p in shared.iterdir()) == ["photo.jpg", "thumb.png"]
    assert (uploads_dir(anywhere) / "thumb.png").read_bytes() == b"cGhvdG8="
