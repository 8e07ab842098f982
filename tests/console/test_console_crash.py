"""A worker is killed while a turn runs: the open page shows the second attempt."""

from __future__ import annotations

import pytest
from console_world import Console
from waiting import wait_until

pytestmark = pytest.mark.slow

LANES = ("methods", "rounds")
SETTINGS = {"agent": {"lease_seconds": 3}}


def test_a_second_attempt_after_a_kill_is_shown_as_such(console: Console) -> None:
    fleet = console.fleet
    console.model.hold()
    with console.window() as window:
        turn = console.say("crash", "Cook.", "send_msg_text(_ck, 'cooked')")
        page = window.go(f"#/turns/{turn}")
        page.locator(".turn-status", has_text="Running").wait_for()
        wait_until(lambda: console.model.waiting, what="the request to the model")
        killed = fleet.worker_of(console.turn(turn)["rounds"][0]["worker"])
        fleet.start("rounds")
        killed.kill()
        page.locator(".tag.attempt", has_text="attempt 2").wait_for()
        console.model.release()
        page.locator(".turn-status", has_text="Done").wait_for()
        page.locator(".from-agent", has_text="cooked").wait_for()
        page.locator(".round-cause", has_text="Attempt 1").wait_for()
        cause = page.locator(".round-cause").inner_text()
        assert f":{killed.pid} was lost" in cause and "began again" in cause
        window.check()


def test_a_program_whose_worker_was_killed_goes_on_in_its_round(console: Console) -> None:
    fleet = console.fleet
    with console.window() as window:
        turn = console.say("cut", "Cook.", "simmer(12, name='soup')\nsend_msg_text(_ck, 'went on')")
        page = window.go(f"#/turns/{turn}")
        page.locator(".call[data-tone='busy']", has_text="simmer").wait_for()
        killed = fleet.worker_of(console.turn(turn)["rounds"][0]["worker"])
        fleet.start("rounds")
        killed.kill()
        page.locator(".tag.attempt", has_text="attempt 2").wait_for()
        page.locator(".from-agent", has_text="went on").wait_for()
        page.locator(".turn-status", has_text="Done").wait_for()
        cause = page.locator(".round-cause").inner_text()
        assert f":{killed.pid} was lost" in cause and "ran its program again" in cause
        assert page.locator(".round").count() == 1
        window.check()
