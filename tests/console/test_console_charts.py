"""Charts over time: they show what the API counts, as drawings and as tables, for a range in the address."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from console_world import DESKTOP, PHONE, Console, axe_script, axe_violations

pytestmark = pytest.mark.extended

CHARTS = ("Turns", "Failed turns", "Time of turns", "Tokens", "Cost")
#: Heights of a chart's bars in percent of its drawing, by their class.
_BARS = """
chart => [...document.querySelectorAll(`[data-chart="${chart}"] .chart-bar`)]
    .map(bar => [bar.classList[1], Number(bar.getAttribute("height"))])
"""


@pytest.fixture(scope="module")
def ended(console: Console) -> None:
    """Two turns that succeed, one of them an hour ago, and one that fails because its code does."""
    for number in range(2):
        turn = console.say(f"chat{number}", "Cook.", "taste('stew')", "send_msg_text(_ck, 'Salt.')", wait=60)
        assert console.ended(turn)["state"] == "done"
        if number == 0:
            move_an_hour_back(console, turn)
    turn = console.say("chat2", "Say nothing.", "raise SystemExit('burnt')", wait=60)
    console.ended(turn)


def move_an_hour_back(console: Console, turn: str) -> None:
    """Let a turn have ended in the hour before, as turns do while a test runs over the end of an hour."""
    with console.database() as database:
        for table, columns in (("rounds", ("requested_at", "finished_at")), ("spendings", ("created_at",))):
            earlier = (f"{one} = strftime('%Y-%m-%d %H:%M:%f000', {one}, '-1 hour')" for one in columns)
            changed = database.execute(
                f"UPDATE {table} SET {', '.join(earlier)} WHERE turn_id = ?", (turn,)
            ).rowcount
            assert changed > 0, table


def summed(points: list[dict[str, Any]], *names: str) -> int:
    """Return the sum of some figures of all points."""
    return sum(int(one[name]) for one in points for name in names)


@pytest.mark.parametrize(("size", "theme"), [(DESKTOP, "light"), (PHONE, "dark")], ids=["desktop", "phone"])
def test_charts_show_the_figures_of_the_api_and_are_accessible(
    console: Console, ended: None, picture: Callable[..., None], size: dict[str, int], theme: str
) -> None:
    with console.window(size=size, theme=theme) as window:
        page = window.go("#/charts")
        points = console.http.get("series").json()["points"]
        busy = [one for one in points if one["turns"]]
        assert len(busy) in (2, 3), "a turn ended in the hour before, and one may have in the hour after"
        for name in CHARTS:
            page.locator(f'[data-chart="{name}"]').wait_for()
        assert page.locator(".chart-plot").count() == len(CHARTS)
        heights = page.evaluate(_BARS, "Tokens")
        prompts = sum(height for tone, height in heights if tone == "tone-done")
        share = summed(points, "prompt_tokens") / summed(points, "prompt_tokens", "completion_tokens")
        assert prompts / sum(height for _, height in heights) == pytest.approx(share)
        highest = max(busy, key=lambda one: one["turns"])
        spoken = page.locator('[data-chart="Turns"] .chart-plot').get_attribute("aria-label")
        assert f"Failed {highest['failed']}" in spoken
        for fold in page.locator("main details").all():
            fold.locator("summary").click()
        rows = page.get_by_role("table", name="Turns", exact=True).locator("tbody tr").all_inner_texts()
        assert [row.split()[-3:] for row in rows] == [
            [str(one["turns"] - one["failed"] - one["cancelled"]), str(one["cancelled"]), str(one["failed"])]
            for one in reversed(busy)
        ]
        picture(page, f"charts-{theme}-{size['width']}", full_page=True)
        assert axe_violations(window, axe_script()) == []
        assert page.evaluate("() => document.documentElement.scrollWidth <= window.innerWidth")
        window.check()


def test_the_range_is_in_the_address_and_opens_again(console: Console, ended: None) -> None:
    asked: list[Any] = []
    with console.window() as window:
        page = window.go("#/charts?range=7d")
        page.on("request", lambda request: asked.append(request.url))
        assert page.get_by_role("button", name="7 days").get_attribute("aria-pressed") == "true"
        assert page.locator('[data-chart="Turns"] .chart-hit').count() == 7
        page.get_by_role("button", name="90 days").click()
        page.wait_for_function(
            "() => document.querySelectorAll('[data-chart=Turns] .chart-hit').length === 90"
        )
        assert page.evaluate("() => location.hash") == "#/charts?range=90d"
        assert page.evaluate("() => document.querySelectorAll('.chart-scale span')[0].textContent") != ""
        window.go("#/chats")
        window.go("#/charts?range=nonsense")
        assert page.get_by_role("button", name="24 hours").get_attribute("aria-pressed") == "true"
        assert any("/series?" in url for url in asked)
        window.check()


def test_a_turn_that_ends_appears_in_an_open_page(console: Console, ended: None) -> None:
    with console.window() as window:
        page = window.go("#/charts")
        before = summed(console.http.get("series").json()["points"], "turns")
        turn = console.say("chat9", "Say it.", "send_msg_text(_ck, 'said')", wait=60)
        console.ended(turn)
        turns = page.locator(".figures div").filter(has=page.get_by_text("Turns", exact=True))
        turns.get_by_text(str(before + 1), exact=True).wait_for()
        window.check()
