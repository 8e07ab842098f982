"""Hooks run in order, and none stops the others."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from nekro.plugins.hooks import PluginHost
from nekro_agent.plugin import NekroPlugin
from nekro_agent.runtime import bound
from nekro_agent.schemas.agent_ctx import AgentCtx
from nekro_agent.schemas.chat_message import ChatMessage, ChatType
from nekro_agent.schemas.signal import MsgSignal, merge_signals
from nekro_agent.testing import InMemoryRuntime


def plugins(count: int) -> list[NekroPlugin]:
    return [NekroPlugin(f"p{n}", f"p{n}", "", "1", "Ada", "") for n in range(count)]


async def test_init_and_cleanup_run_once_in_order_and_in_reverse(tmp_path: Path) -> None:
    events: list[str] = []
    three = plugins(3)
    for plugin in three:

        @plugin.mount_init_method()
        async def init(name: str = plugin.name) -> None:
            events.append(f"init {name}")
            if name == "p1":
                raise ValueError("no config")

        @plugin.mount_cleanup_method()
        def cleanup(name: str = plugin.name) -> None:
            events.append(f"cleanup {name}")

    three[2].set_enabled(False)
    host = PluginHost(three)
    with bound(InMemoryRuntime(data_dir=tmp_path).runtime):
        (failure,) = await host.start()
        assert (failure.plugin_key, failure.hook, failure.error) == (
            "Ada.p1",
            "init",
            "ValueError: no config",
        )
        assert await host.stop() == [] and await host.stop() == []
    assert events == ["init p0", "init p1", "cleanup p1", "cleanup p0"]


@pytest.mark.parametrize(
    ("failure", "error"),
    [
        (ValueError("bad"), "ValueError: bad"),
        (SystemExit(3), "SystemExit: 3"),
        (asyncio.CancelledError(), "CancelledError"),
        (TimeoutError("own"), "own"),
    ],
)
async def test_a_failing_hook_stops_neither_the_others_nor_the_worker(
    failure: BaseException, error: str
) -> None:
    reached: list[str] = []
    bad, good = plugins(2)

    @bad.mount_on_channel_reset()
    async def reset_badly(ctx: AgentCtx) -> None:
        raise failure

    @good.mount_on_channel_reset()
    async def reset(ctx: AgentCtx) -> None:
        reached.append(f"{ctx.chat_key} {ctx.plugin_key}")

    (reported,) = await PluginHost([bad, good]).channel_reset(AgentCtx.for_call(chat_key="c"))
    assert reported.error == error
    assert reached == ["c Ada.p1"]


async def test_a_hook_that_does_not_end_is_abandoned_and_does_not_block_shutdown() -> None:
    (plugin,) = plugins(1)

    @plugin.mount_on_channel_reset()
    async def reset(ctx: AgentCtx) -> None:
        await asyncio.Event().wait()

    ctx = AgentCtx.for_call(chat_key="c")
    (failure,) = await PluginHost([plugin], hook_seconds=0.01).channel_reset(ctx)
    assert failure.error == "did not end within 0.01 s"
    task = asyncio.create_task(PluginHost([plugin]).channel_reset(ctx))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_cleanups_share_a_time_limit_and_a_hanging_one_does_not_block_shutdown() -> None:
    first, hanging = plugins(2)
    reached: list[str] = []

    @first.mount_cleanup_method()
    async def clean() -> None:
        reached.append("began")
        await asyncio.sleep(0)
        reached.append("ended")

    @hanging.mount_cleanup_method()
    async def hang() -> None:
        await asyncio.Event().wait()

    host = PluginHost([first, hanging], cleanup_seconds=0.05)
    await host.start()
    failures = await host.stop()
    assert [(failure.plugin_key, failure.hook) for failure in failures] == [
        ("Ada.p1", "cleanup"),
        ("Ada.p0", "cleanup"),
    ]
    assert "ended" not in reached
    assert await host.stop() == []


def test_prompts_are_injected_for_the_adapters_that_a_plugin_supports() -> None:
    everywhere, only_discord = plugins(2)
    only_discord.support_adapter = ["discord"]
    both = [everywhere, only_discord]
    # An unknown adapter has every plugin, in hooks as in prompts.
    for adapter, expected in [("discord", both), ("onebot_v11", [everywhere]), (None, both)]:
        assert [plugin for plugin in both if plugin.serves(adapter)] == expected


@pytest.mark.parametrize(
    ("answers", "merged"),
    [
        ([], MsgSignal.CONTINUE),
        ([None, None], MsgSignal.CONTINUE),
        ([MsgSignal.BLOCK_TRIGGER, None], MsgSignal.BLOCK_TRIGGER),
        ([MsgSignal.BLOCK_TRIGGER, MsgSignal.FORCE_TRIGGER], MsgSignal.FORCE_TRIGGER),
        ([MsgSignal.FORCE_TRIGGER, MsgSignal.BLOCK_ALL], MsgSignal.BLOCK_ALL),
    ],
)
def test_signals_are_merged_by_strength(answers: list[MsgSignal | None], merged: MsgSignal) -> None:
    assert merge_signals(answers) is merged


@pytest.mark.parametrize(
    ("answer", "signal"), [(2, MsgSignal.BLOCK_ALL), (True, 0), ("x", 0), (9, 0), (None, 0)]
)
async def test_an_unknown_signal_counts_as_continue(answer: Any, signal: int) -> None:
    (plugin,) = plugins(1)

    @plugin.mount_on_message()
    async def on_message(ctx: AgentCtx, message: ChatMessage) -> Any:
        return answer

    host, ctx = PluginHost([plugin]), AgentCtx.for_call(chat_key="c", user_id="u")
    assert await host.user_message(ctx, ChatMessage(chat_key="c")) == signal


async def test_switching_an_unknown_plugin_is_an_error() -> None:
    with pytest.raises(KeyError):
        await PluginHost([]).set_enabled("Ada.none", True)


def test_chat_types_are_guessed_from_keys() -> None:
    assert ChatType.from_chat_key("onebot_v11-group_1") is ChatType.GROUP
    assert ChatType.from_chat_key("x-private_1") is ChatType.PRIVATE
    assert ChatType.from_chat_key("x") is ChatType.UNKNOWN
    assert ChatMessage(chat_key="c", sender_id="-1").is_self
