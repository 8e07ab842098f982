"""A turn of 2,000 calls: all of them are there, and only those in sight are laid out."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from console_world import DESKTOP, PHONE, Console
from waiting import WAIT_SECONDS

pytestmark = pytest.mark.extended

CALLS = 2000
#: Scrolling lays out every call, which takes most of the time.
MEASURES = bool(os.environ.get("NEKRO_TEST_ARTEFACTS"))
#: Scrolls through the page, a window's height per frame, and returns the milliseconds of each frame.
_SCROLL = """
async () => {
  const frames = [];
  let last = performance.now();
  const end = document.documentElement.scrollHeight;
  for (let at = 0; at < end; at += innerHeight) {
    scrollTo(0, at);
    await new Promise(requestAnimationFrame);
    const now = performance.now();
    frames.push(now - last);
    last = now;
  }
  return frames;
}
"""
_TWO_FRAMES = "() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))"
#: Rows whose content the browser has laid out.
_LAID_OUT = """
() => [...document.querySelectorAll('.calls > li')]
  .filter(one => one.firstChild.checkVisibility({ contentVisibilityAuto: true })).length
"""


def scrolled(page: Any) -> dict[str, float]:
    """Scroll to the end and back; returns the frames' figures."""
    frames = sorted(page.evaluate(_SCROLL))
    page.evaluate("scrollTo(0, 0)")
    return {
        "frames": len(frames),
        "frame_ms_median": round(frames[len(frames) // 2], 1),
        "frame_ms_p95": round(frames[int(len(frames) * 0.95)], 1),
    }


def test_a_turn_of_2000_calls_is_complete_and_only_what_is_seen_is_laid_out(
    console: Console, artefacts: Path
) -> None:
    turn = console.say("pantry", "Weigh it all.", f"for number in range({CALLS}):\n    weigh(number)")
    assert len(console.ended(turn, seconds=2 * WAIT_SECONDS)["rounds"][0]["calls"]) == CALLS
    figures: dict[str, dict[str, float]] = {}
    for name, size in (("desktop", DESKTOP), ("phone", PHONE)):
        with console.window(size=size) as window:
            page = window.go("#/chats")
            began = page.evaluate("performance.now()")
            page.evaluate("turn => { location.hash = `#/turns/${turn}` }", turn)
            page.wait_for_function(f"() => document.querySelectorAll('.call').length === {CALLS}")
            # Two frames later it has been painted.
            page.evaluate(
                "() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))"
            )
            shown = page.evaluate("performance.now()") - began
            figures[name] = {
                "shown_ms": round(shown),
                **(scrolled(page) if MEASURES else {}),
                "elements": page.evaluate("document.querySelectorAll('*').length"),
                "bars": page.evaluate("document.querySelectorAll('.waterfall .bar').length"),
                "laid_out": page.evaluate(_LAID_OUT),
            }
            assert figures[name]["laid_out"] < CALLS / 4
            assert figures[name]["bars"] < CALLS
            if size is PHONE:  # the filter does not depend on the window
                window.check()
                continue
            page.get_by_label("Filter calls by method").fill("nothing")
            page.wait_for_function("() => document.querySelectorAll('.call').length === 0")
            page.get_by_label("Filter calls by method").fill("weigh")
            page.wait_for_function(f"() => document.querySelectorAll('.call').length === {CALLS}")
            last = page.locator(".call").last
            last.locator("summary").click()
            last.locator(".call-body", has_text=str(CALLS - 1)).wait_for()
            window.check()
    (artefacts / "large-turn.json").write_text(json.dumps(figures, indent=2))
