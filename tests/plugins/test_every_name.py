"""API names that the other plugins do not use, in one plugin, in memory and through the queue."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from plugin_world import CHAT, USER, World

from nekro_agent.commands.schemas import CommandExecutionContext
from nekro_agent.ports import MessageKind


async def facts(world: World, method: str) -> dict[str, Any]:
    value = (await world.call(method)).value
    assert isinstance(value, dict)
    return value


async def test_a_plugin_reads_its_own_metadata(anywhere: World) -> None:
    assert await facts(anywhere, "plugin_facts") == {
        "identity": ["every name", "every_name", "Ada.every_name", "2.0", "Ada", "https://example.com"],
        "description": "padded",
        "enabled": True,
        "adapters": [],
        "webui": "ui",
        "methods": ["plugin_facts", "context_facts"],
        "type": "tool",
        "file": [True, "default"],
        "titles": ["Model group", ""],
        "collection": "Ada.every_name-notes",
        "depth": True,
        "uploads": True,
        "docs": "Names",
        "store": True,
    }


async def test_a_context_offers_more_than_files_and_messages(anywhere: World) -> None:
    assert await facts(anywhere, "context_facts") == {
        "factories": [CHAT, True, "box"],
        "by_key": ["other-chat", None],
        "preset": [True, None, -1],
        "proxy": None,
        "group": "KeyError",
        "bot": "ValueError",
        "workspace": None,
        "module": True,
        "user": [USER, USER],
        "channel": CHAT,
    }


async def test_every_way_to_send_a_message_works(anywhere: World) -> None:
    await anywhere.call("all_messages")
    assert await anywhere.texts(CHAT, MessageKind.ASSISTANT) == ["one", "two", "three"]
    assert await anywhere.texts(CHAT, MessageKind.SYSTEM) == ["four", "five", "six"]
    assert await anywhere.woken(CHAT) == 1


async def test_jobs_are_listed_and_stopped_together(anywhere: World) -> None:
    assert await facts(anywhere, "job_facts") == {
        "ids": ["w1", CHAT, "w1", True],
        "running": ["watch:w1", "watch:w2"],
        "is_running": [True, False],
        "unknown": [None, None],
        "runner": True,
        "terminal": [True, 100],
        "signal": True,
        "stopped": 2,
    }


async def test_a_recurring_timer_behaves_as_documented(anywhere: World) -> None:
    assert await facts(anywhere, "timer_facts") == {
        "listed": [True],
        "paused": "paused",
        "summary": [1, 0, ["retro"], 0],
        "run": True,
        "deleted": [True, False],
        "valid": ["UTC", "0 9 * * *"],
        "cleared": True,
    }


async def test_texts_and_multi_part_answers_work(anywhere: World) -> None:
    assert [(await anywhere.call("texts_in", lang)).value for lang in ("zh-CN", "en-US")] == ["你好", "hello"]
    who = CommandExecutionContext(user_id="u", chat_key=CHAT)
    working, done = await anywhere.command("/parts", who)
    assert (working.message, done.message) == ("working", "for u")
    parts = [
        (part.type.value, part.file_path and Path(part.file_path).name, part.mime_type, part.web_url)
        for part in done.output_segments or []
    ]
    assert parts == [
        ("image", "a.png", "image/png", None),
        ("file", None, None, "https://example.com/a"),
    ]
