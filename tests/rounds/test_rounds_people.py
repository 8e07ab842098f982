"""What plugins set on people, chats, presets and messages changes rounds."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from round_bench import Bench, Model, states

from nekro.app import use_cases
from nekro_agent.models.db_chat_channel import DBChatChannel
from nekro_agent.models.db_chat_message import DBChatMessage
from nekro_agent.models.db_user import DBUser
from nekro_agent.ports import IncomingMessage
from nekro_agent.services.message_service import message_service

OpenBench = Callable[..., Awaitable[Bench]]
PLUGINS = {"dirs": (Path(__file__).parent / "people_plugins",)}
GROUP = "onebot_v11-group_5"
SAY = 'send_msg_text(_ck, "done")'


@pytest.fixture
def kind() -> str:
    """One kind of database: what the models read and write is tested on both."""
    return "sqlite"


async def test_messages_of_a_banned_person_are_recorded_and_start_no_round(
    kind: str, open_bench: OpenBench
) -> None:
    bench = await open_bench(kind, plugins=PLUGINS)
    drain = bench.drain(Model(SAY, 'print(pardon("eve"))\nexit(9)', SAY, SAY))
    assert await bench.say(GROUP, "hello", user_id="eve")
    assert await bench.say(GROUP, "buy now", user_id="eve")  # the hook bans before this message triggers
    assert await bench.say(GROUP, "please?", user_id="eve")
    assert [item.user_id for item in await bench.rounds(GROUP)] == ["eve"]
    assert [message.text for message in await bench.messages(GROUP)] == ["hello", "buy now", "please?"]
    user = await DBUser.get_by_union_id("onebot_v11", "eve")
    assert user is not None and not user.is_active and user.id > 0
    await bench.play(GROUP, drain)
    await bench.say(GROUP, "let eve talk", user_id="ada")
    await bench.play(GROUP, drain)
    await bench.say(GROUP, "thanks", user_id="eve")
    assert states(await bench.rounds(GROUP))[-1] == "requested"
    await drain.close()


async def test_messages_of_a_person_whose_triggering_is_prevented_start_no_round(
    kind: str, open_bench: OpenBench
) -> None:
    bench = await open_bench(kind, plugins=PLUGINS)
    await bench.say(GROUP, "!quiet", user_id="bob")
    await bench.say(GROUP, "!wake", user_id="bob")
    assert await bench.rounds(GROUP) == []
    await bench.say(GROUP, "!wake", user_id="ada")
    await bench.say("discord-7", "another adapter's bob", user_id="bob")
    assert len(await bench.rounds(GROUP)) == 1 and len(await bench.rounds("discord-7")) == 1


@pytest.mark.extended
async def test_a_preset_is_the_persona_in_the_next_prompt_of_the_turn(
    kind: str, open_bench: OpenBench
) -> None:
    bench = await open_bench(kind, plugins=PLUGINS, agent={"persona": "You are a clerk."})
    model = Model('print(change_persona("Pirate", "You are a pirate."))\nexit(9)', SAY)
    drain = bench.drain(model)
    await bench.say(GROUP, "be a pirate")
    await bench.play(GROUP, drain)
    first, second = model.prompts
    assert "You are a clerk." in first and "You are a pirate." not in first
    assert "You are a pirate." in second and "You are a clerk." not in second
    assert "Pirate" in second  # the method's text names the preset
    await (await DBChatChannel.get_channel(GROUP)).set_preset(None)
    await bench.say(GROUP, "and now?")
    await bench.play(GROUP, bench.drain(model))
    assert "You are a clerk." in model.prompts[-1]
    await drain.close()


async def test_a_deleted_message_is_not_in_the_next_prompt_of_the_turn(
    kind: str, open_bench: OpenBench
) -> None:
    bench = await open_bench(kind, plugins=PLUGINS)
    model = Model('print("gone:", forget("my password"))\nexit(9)', SAY)
    drain = bench.drain(model)
    await bench.say(GROUP, "my password is tulip")
    await bench.say(GROUP, "please forget it")
    await bench.play(GROUP, drain)
    first, second = model.prompts
    assert "tulip" in first
    assert "tulip" not in second and "please forget it" in second and "gone: 1" in second
    await drain.close()


async def test_a_recalled_or_changed_message_is_shown_so(kind: str, open_bench: OpenBench) -> None:
    bench = await open_bench(kind, plugins=PLUGINS)
    for text in ("a tulip", "a rose", "an iris"):
        await bench.say(GROUP, text)
    one = await DBChatMessage.get(chat_key=GROUP, content_text="a tulip")
    one.is_recalled = True
    await one.save()
    rose = DBChatMessage.filter(chat_key=GROUP, content_text="a rose")
    assert await rose.update(content_text="a peony") == 1
    model = Model(SAY)
    drain = bench.drain(model)
    await bench.play(GROUP, drain)
    (prompt,) = model.prompts
    assert [word for word in ("tulip", "rose", "peony", "iris") if word in prompt] == ["peony", "iris"]
    await drain.close()


async def test_a_chat_that_is_disabled_or_observed_starts_no_turn(kind: str, open_bench: OpenBench) -> None:
    bench = await open_bench(kind, plugins=PLUGINS)
    channel = await DBChatChannel.get_channel(GROUP)
    for status in ("disabled", "observe"):
        await channel.set_channel_status(status)
        assert await bench.say(GROUP, f"hello {status}")
        await message_service.push_system_message(GROUP, "note", trigger_agent=True)
        await message_service.schedule_agent_task(GROUP)
    assert await bench.rounds(GROUP) == [] and len(await bench.messages(GROUP)) == 4
    await channel.set_channel_status("active")
    await bench.say(GROUP, "hello")
    assert len(await bench.rounds(GROUP)) == 1


async def test_an_overheard_message_starts_a_turn_only_if_a_hook_demands_it(
    kind: str, open_bench: OpenBench
) -> None:
    bench = await open_bench(kind, plugins=PLUGINS)

    async def overhear(text: str) -> None:
        await bench.services.intake.receive(
            IncomingMessage(chat_key=GROUP, text=text, user_id="u", user_name="U", is_tome=False)
        )

    await overhear("see you tomorrow")
    assert await bench.rounds(GROUP) == []
    assert [row.is_tome for row in await DBChatMessage.filter(chat_key=GROUP)] == [0]
    await overhear("!wake up")
    assert len(await bench.rounds(GROUP)) == 1
    await bench.say(GROUP, "you there")
    assert (await DBChatMessage.get(content_text="you there")).is_tome == 1


async def test_a_message_is_recorded_as_the_hooks_leave_it(kind: str, open_bench: OpenBench) -> None:
    bench = await open_bench(kind, plugins=PLUGINS)
    await bench.say(GROUP, "!tidy  the desk")
    tidied = await DBChatMessage.get(chat_key=GROUP)
    assert (tidied.content_text, tidied.sender_nickname, tidied.is_tome) == ("the desk", "tidied", 0)
    assert json.loads(tidied.ext_data) == {"tidied_by": "Ada.warden"}
    assert await bench.rounds(GROUP) == []
    # What cannot be recorded is ignored, and the message is not lost.
    await bench.say(GROUP, "!break")
    assert (await DBChatMessage.get(content_text="!break")).is_tome == 1
    assert len(await bench.rounds(GROUP)) == 1


@pytest.mark.extended
async def test_a_plugin_of_an_adapter_is_in_prompts_of_its_chats_and_of_chats_without_adapter(
    kind: str, open_bench: OpenBench
) -> None:
    bench = await open_bench(kind, plugins=PLUGINS)
    shown = {}
    for chat_key in (GROUP, "telegram-group_5", "demo"):
        model = Model(SAY)
        drain = bench.drain(model)
        await bench.say(chat_key, "hello")
        await bench.play(chat_key, drain)
        await drain.close()
        shown[chat_key] = "change_persona" in model.prompts[0]
    assert shown == {GROUP: True, "telegram-group_5": False, "demo": True}


async def test_an_intake_states_the_channel_of_a_chat(kind: str, open_bench: OpenBench) -> None:
    bench = await open_bench(kind, plugins=PLUGINS)
    await use_cases.receive_message(
        bench.services, "support/42", "hello", user_id="u", user_name="U", adapter_key="onebot_v11",
        channel_type="group",
        channel_id="g42", channel_name="Support",
    )  # fmt: skip
    await bench.say("support/42", "again")
    row = await DBChatChannel.get(chat_key="support/42")
    assert (row.adapter_key, row.channel_id, row.channel_type, row.channel_name) == (
        "onebot_v11",
        "g42",
        "group",
        "Support",
    )
    assert (await DBUser.get(platform_userid="u")).adapter_key == "onebot_v11"
    model = Model(SAY)
    drain = bench.drain(model)
    await bench.play("support/42", drain)
    assert "change_persona" in model.prompts[0] and 'chat="Support"' in model.prompts[0]
    await drain.close()
