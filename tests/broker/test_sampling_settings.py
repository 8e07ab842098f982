"""Which share of the turns keeps its TOOL calls, if the setting is unset."""

from __future__ import annotations

import pytest

from broker_config.settings import FLEET_TOOL_CALL_SHARE, Settings


@pytest.mark.parametrize("url", [None, "redis+socket:///run/redis.sock", "unix:///run/redis.sock?db=1"])
def test_one_machine_keeps_all_tool_calls(url: str | None) -> None:
    assert Settings.load(env_file=None, broker={"url": url}).tool_call_share == 1


@pytest.mark.parametrize("url", ["redis://h/0", "rediss://h/0", "sentinel://h:26379/0", "amqp://h//"])
def test_a_fleet_keeps_those_of_a_tenth_of_the_turns(url: str) -> None:
    assert Settings.load(env_file=None, broker={"url": url}).tool_call_share == FLEET_TOOL_CALL_SHARE == 0.1


@pytest.mark.parametrize("share", [0, 0.5, 1])
def test_a_share_that_is_set_holds_everywhere(share: float) -> None:
    for url in (None, "redis://h/0"):
        settings = Settings.load(env_file=None, broker={"url": url}, agent={"tool_call_share": share})
        assert settings.tool_call_share == share
