"""The reference of the API in a browser: reached from the console, accessible, without scripts of its own."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from console_world import LOOKS, PHONE, Console, Watched, axe_script, axe_violations

pytestmark = pytest.mark.extended

LANES = ()
_OPEN = "() => document.querySelectorAll('details').forEach(one => { one.open = true })"


def test_the_console_leads_to_the_reference(console: Console) -> None:
    with console.window() as window:
        page = window.go("#/jobs")
        link = page.get_by_role("link", name="API reference")
        assert link.get_attribute("target") == "_blank"
        page.goto(f"{console.url}{link.get_attribute('href')}")
        page.locator("nav summary", has_text="operations").click()
        page.get_by_role("link", name="get_costs").first.click()
        assert page.url.endswith("/reference#get_costs")
        section = page.locator("#get_costs")
        assert section.get_by_text("/api/v1/costs", exact=False).first.is_visible()
        section.get_by_text("200 application/json").click()
        assert '"sandbox_seconds": 18.4' in section.inner_text()
        window.check()


@pytest.mark.parametrize(("width", "theme"), LOOKS)
def test_the_checker_finds_no_fault_in_the_reference(
    console: Console, picture: Callable[..., None], width: int, theme: str
) -> None:
    size = PHONE if width == PHONE["width"] else {"width": width, "height": 860}
    context = console.browser.new_context(viewport=size, color_scheme=theme)
    try:
        window = Watched(context.new_page(), console)
        page = window.page
        page.goto(f"{console.url}/reference")  # without a key
        picture(page, f"reference-{width}-{theme}")
        page.evaluate(_OPEN)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert page.evaluate("[...document.scripts].map(one => one.getAttribute('src'))") == [
            "/console/early.js"
        ]
        anchors = page.evaluate(
            "[...document.querySelectorAll('a[href^=\"#\"]')].map(a => a.hash.slice(1))"
            ".filter(id => !document.getElementById(id))"
        )
        assert anchors == []
        assert not re.search(r"\son\w+=|\sstyle=", page.content())
        assert axe_violations(window, axe_script()) == []
        assert window.faults == []
    finally:
        context.close()
