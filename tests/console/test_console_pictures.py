"""Takes the pictures of `docs/console.md`; `make console-pictures` keeps them."""

from __future__ import annotations

from pathlib import Path

import pytest
from console_world import DESKTOP, PHONE, Console

pytestmark = pytest.mark.slow

LANES = ("methods", "methods", "long", "rounds")
ASKED = "Please plan tonight's dinner: find a vegan recipe for four, weigh the vegetables and send a photo."
FIRST = """
best = recipe("lentil stew", 4, is_vegan=True)
print("Found", best["name"], "for", best["portions"])

for vegetable in ["carrots", "onions", "celery"]:
    grams = weigh({"name": vegetable, "grams": 120})
    print(vegetable, grams["grams"], "g")

simmer(1.5, name="stew")
photo("stew.png")
send_msg_text(_ck, "Here is the stew. I taste it before I send the list.")
taste("lentil stew")
"""
SECOND = """
try:
    burn("the oven is too hot")
except Exception as error:
    print("failed:", error)
note("list.txt", "carrots\\nonions\\nsalt\\n")
bake("rolls")
send_msg_text(_ck, "It needs salt. The shopping list is attached.")
"""
PAINTED = "() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))"
TO_TOP = "one => scrollTo(0, one.getBoundingClientRect().top + scrollY - 72)"
#: Whether all pictures are drawn, also those out of sight.
DRAWN = """
() => [...document.querySelectorAll('main img')].every(one => { one.loading = 'eager'; return one.complete })
"""
SLOW = """
for number in range(1, 60):
    print("pot", number, "is on the stove")
    simmer(2, name=f"pot {number}")
"""


def test_take_the_pictures(console: Console, artefacts: Path) -> None:
    """Each picture shows a window, not a whole page."""
    turn = console.say("dinner", ASKED, FIRST, SECOND, wait=60)
    console.ended(turn)
    console.say("shop", "Order carrots for tomorrow.", 'order("carrots", amount=3)', wait=60)
    live = console.say("stove", "Cook the soup for the party.", SLOW)

    def take(
        name: str, address: str, *, size: dict[str, int] = DESKTOP, theme: str = "light", to: str = ""
    ) -> None:
        scale = 2 if size is PHONE else 1
        with console.window(size=size, theme=theme, device_scale_factor=scale) as window:
            page = window.go(address)
            page.wait_for_function(DRAWN)
            if to:
                page.locator(to).first.evaluate(TO_TOP)
            page.evaluate(PAINTED)
            page.screenshot(path=artefacts / f"{name}.png")

    with console.window(size={"width": 1280, "height": 1000}) as window:
        page = window.go(f"#/turns/{live}")
        page.locator(".call").nth(2).wait_for()
        page.locator("pre.output").wait_for()
        page.screenshot(path=artefacts / "turn-live.png")
    tall = {"width": 1280, "height": 1000}
    take("turn", f"#/turns/{turn}", size=tall, to=".timeline")
    take("turn-dark", f"#/turns/{turn}", size=tall, theme="dark", to=".timeline")
    take("turn-phone", f"#/turns/{turn}", size=PHONE, to=".timeline")
    take("talk-phone", "#/chats/dinner", size=PHONE, to=".picture")
    take("approval-phone", "#/chats/shop", size=PHONE, to=".approval")
    take("chats", "#/chats")
    take("plugin", "#/plugins/Ada.kitchen", size=tall)
    take("operations", "#/operations")
    console.http.post(f"turns/{live}/cancel")
