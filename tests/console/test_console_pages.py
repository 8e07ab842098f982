"""Every page of the console: it is accessible, fits a phone, and works by keyboard, in both themes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from console_world import LOOKS, PHONE, Console, Watched, axe_script, axe_violations
from waiting import wait_until

pytestmark = pytest.mark.extended

SETTINGS = {"agent": {"keep_prompts": True}}
#: Names of the pages, with their addresses; ``{turn}`` and ``{approval}`` are of the file's system.
PAGES = {
    "chats": "#/chats",
    "talk": "#/chats/dinner",
    "talk-approval": "#/chats/shop",
    "talk-markdown": "#/chats/report",
    "turn": "#/turns/{turn}",
    "turn-markdown": "#/turns/{report}",
    "turns": "#/turns",
    "turns-filtered": "#/turns?state=done&plugin=Ada.kitchen",
    "jobs": "#/jobs?show=all",
    "job": "#/jobs/{job}",
    "approvals": "#/approvals",
    "approval": "#/approvals/{approval}",
    "timers": "#/timers",
    "plugins": "#/plugins",
    "plugin": "#/plugins/Ada.kitchen",
    "mcp": "#/mcp",
    "operations": "#/operations",
    "charts": "#/charts",
    "costs": "#/costs",
    "keys": "#/keys",
    "missing": "#/nowhere",
}

#: A message of the agent with everything that its words can become. The model's own fences are backticks.
REPORT = """
# Dinner for four

The stew is **ready**; *salt* it, ~~pepper~~ no pepper.
See [the recipe](https://recipes.example/stew) or `recipe()`.

#### Shopping list
1. Carrots
   - organic
   - [x] bought
2. Celery

> Taste it first.
> > Twice.

| Vegetable | Grams | Where it comes from | What it is good for | How long it cooks |
|---|---:|:-:|---|---|
| carrots | 120 | the garden behind the house | sweetness and colour | twenty minutes |
| celery | 80 | the market<br>on Saturday | **taste** | `15` minutes |

---
## The program
~~~python
def weigh(name: str) -> int:  # grams, by a line that is longer than the screen of any phone is wide
    return {"carrots": 120}.get(name, 0)
~~~
~~~json
{"name": "stew", "portions": 4, "is_vegan": true}
~~~
~~~bash
nekro chat report  # the same in a terminal
~~~
![A plate](https://pictures.example/plate.png)
"""

_OPEN = "() => document.querySelectorAll('main details').forEach(one => { one.open = true })"
#: Whether all pictures are drawn, also those out of sight.
_DRAWN = """
() => !document.querySelector('main .loading')
  && [...document.querySelectorAll('main img')].every(one => { one.loading = 'eager'; return one.complete })
"""


@pytest.fixture(scope="module")
def addresses(console: Console) -> dict[str, str]:
    """The pages of a system in which something of each kind has happened."""
    turn = console.say(
        "dinner",
        "Please plan tonight's dinner: find a vegan recipe for four, weigh the vegetables and send a photo.",
        "best = recipe('lentil stew', 4, is_vegan=True)\nprint('Found', best['name'])\n"
        "for vegetable in ['carrots', 'onions', 'celery']:\n"
        "    grams = weigh({'name': vegetable, 'grams': 120})\n    print(vegetable, grams['grams'], 'g')\n"
        "photo('stew.png')\nsend_msg_text(_ck, 'Here is the stew. I taste it first.')\ntaste('lentil stew')",
        "try:\n    burn('the oven is too hot')\nexcept Exception as error:\n    print('failed:', error)\n"
        "note('list.txt', 'carrots\\nonions\\nsalt\\n')\nremind('Look into the oven')\n"
        "send_msg_text(_ck, 'It needs salt. The list is attached.')\nbake('rolls')",
        wait=60,
    )
    console.ended(turn)
    shop = console.say("shop", "Order carrots.", "order('carrots', amount=3)", wait=60)
    console.ended(shop)
    report = console.say("report", "Report.", f"send_msg_text(_ck, {REPORT!r})", wait=60)
    console.ended(report)
    declared = console.http.put(
        "mcp/servers/clock", json={"declaration": {"command": "no-such-program", "args": ["--utc"]}}
    )
    assert declared.is_success, declared.text
    (approval,) = console.http.get("approvals", params={"chat_key": "shop"}).json()["items"]
    (job,) = (one for one in console.turn(turn)["jobs"] if one["task_id"] == "rolls")
    named = {"turn": turn, "report": report, "approval": approval["id"], "job": job["id"]}
    return {name: page.format(**named) for name, page in PAGES.items()}


@pytest.fixture(scope="module")
def axe() -> str:
    return axe_script()


def opened(window: Watched, address: str) -> None:
    """Go to a page and open what is folded, so that it is checked too."""
    window.go(address)
    window.page.evaluate(_OPEN)
    window.page.wait_for_function(_DRAWN)


@pytest.mark.parametrize(("width", "theme"), LOOKS)
def test_the_checker_finds_no_fault_on_any_page_and_none_is_wider_than_its_window(
    console: Console,
    addresses: dict[str, str],
    axe: str,
    picture: Callable[..., None],
    width: int,
    theme: str,
) -> None:
    size = PHONE if width == PHONE["width"] else {"width": width, "height": 860}
    found: dict[str, list[str]] = {}
    with console.window(size=size, theme=theme) as window:
        for name, address in addresses.items():
            opened(window, address)
            picture(window.page, f"{name}-{width}-{theme}", full_page=True)
            faults = axe_violations(window, axe)
            wide = window.page.evaluate("document.documentElement.scrollWidth")
            found[name] = faults + ([f"it is {wide} px wide"] if wide > width else [])
        window.check()
    assert [f"{name}: {fault}" for name, faults in found.items() for fault in faults] == []


def test_the_login_page_is_accessible_and_refuses_a_false_key(
    console: Console, axe: str, picture: Callable[..., None]
) -> None:
    context = console.browser.new_context(viewport=PHONE)
    try:
        window = Watched(context.new_page(), console)
        page = window.page
        page.goto(f"{console.url}/console/#/jobs")
        page.get_by_label("Key").fill("nk_0000000000000000_" + "a" * 43)
        page.keyboard.press("Enter")
        page.get_by_role("alert").filter(has_text="unknown, revoked or expired").wait_for()
        assert axe_violations(window, axe) == []
        picture(page, "login-360-light", full_page=True)
        page.get_by_label("Key").fill(console.key)
        page.keyboard.press("Enter")
        page.get_by_role("heading", name="Jobs").wait_for()  # the page that was asked for
        assert console.key not in page.evaluate("document.cookie + JSON.stringify({...localStorage})")
        page.set_viewport_size({"width": 1280, "height": 800})
        page.get_by_role("button", name="Log out").click()
        page.get_by_role("heading", name="Log in").wait_for()
        page.goto(f"{console.url}/console/#/keys")
        page.get_by_role("heading", name="Log in").wait_for()
    finally:
        context.close()


def test_everything_is_reached_by_keyboard(console: Console, addresses: dict[str, str]) -> None:
    with console.window() as window:
        page = window.go(addresses["chats"])

        def until(selector: str, key: str = "Tab") -> None:
            for _ in range(80):
                page.keyboard.press(key)
                if page.evaluate("selector => document.activeElement.matches(selector)", selector):
                    outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
                    assert outline != "none", f"{selector} shows no focus"
                    return
            raise AssertionError(f"{selector} is not reached")

        until(".skip")
        page.keyboard.press("Enter")
        assert page.evaluate("document.activeElement.tagName") == "H1"
        page.keyboard.press("/")
        page.keyboard.type("dinner")
        page.wait_for_function("() => document.querySelectorAll('main .list-link').length === 1")
        until("main .list-link")
        page.keyboard.press("Enter")
        page.locator(".talk-how").first.wait_for()
        until(".talk-how")
        page.keyboard.press("Enter")
        page.locator(".turn-status", has_text="Done").wait_for()
        until(".call > summary")
        page.keyboard.press("Enter")
        page.locator(".call[open] .call-body").wait_for()
        page.keyboard.press("Escape")

        def went() -> bool:
            page.keyboard.press("g")  # the other key within 1.5 s
            page.keyboard.press("a")
            return "approvals" in page.url

        wait_until(went, what="the page of approvals")
        page.get_by_role("heading", name="Approvals").wait_for()
        window.shown()
        until("main .list-link")
        page.keyboard.press("Enter")
        page.locator(".approval").wait_for()
        until("input[type=radio]")
        page.keyboard.press("ArrowDown")
        assert page.evaluate("document.activeElement.value") == "turn"
        until("[data-key=deny]")
        page.keyboard.press("?")
        page.locator("dialog[open]").wait_for()
        page.keyboard.press("Escape")
        page.locator("dialog").wait_for(state="detached")
        window.check()


def test_words_of_the_agent_are_markdown_also_on_a_phone(console: Console, addresses: dict[str, str]) -> None:
    with console.window(size=PHONE) as window:
        page = window.go(addresses["talk-markdown"])
        said = page.locator(".from-agent .markdown")
        levels = said.locator(":is(h1, h2, h3, h4, h5, h6)").evaluate_all(
            "all => all.map(one => one.tagName)"
        )
        assert levels == ["H2", "H3", "H3"]
        links = said.locator("a").evaluate_all(
            "all => all.map(one => [one.href, one.rel, one.target, one.innerText])"
        )
        rel = "noopener noreferrer nofollow"
        assert links == [
            ["https://recipes.example/stew", rel, "_blank", "the recipe"],
            ["https://pictures.example/plate.png", rel, "_blank", "Picture: A plate"],
        ]
        assert said.locator("img").count() == 0
        assert said.locator("ol > li").count() == 2 and said.locator("ol ul > li").count() == 2
        for coloured in (".tok-keyword", ".tok-string", ".tok-number", ".tok-comment"):
            assert said.locator(f"pre {coloured}").count() > 0
        table = said.get_by_role("group", name="Table in the message")
        table.focus()
        page.keyboard.press("ArrowRight")
        page.wait_for_function("one => one.scrollLeft > 0", arg=table.element_handle())
        window.check()
        # In a list a message has its words only.
        window.go(addresses["chats"])
        page.locator(".list-text", has_text="Dinner for four The stew is ready; salt it").wait_for()


def test_filters_of_turns_are_in_the_address_for_others_reload_and_back(
    console: Console, addresses: dict[str, str], picture: Callable[..., None]
) -> None:
    with console.window(size=PHONE) as window:
        page = window.go("#/turns")
        rows = page.locator("main .list-link")
        every = rows.count()
        page.get_by_label("Plugin called").fill("Ada.kitchen")
        page.keyboard.press("Enter")
        page.get_by_role("button", name="Done", exact=True).click()
        page.wait_for_function("() => location.hash.endsWith('state=done')")
        window.shown()
        # The list before is shown until the next one has come.
        page.wait_for_function(
            "() => [...document.querySelectorAll('main .list-link')].every(a => /Done$/.test(a.textContent))"
        )
        assert 0 < rows.count() < every
        address = page.evaluate("location.hash")
        assert address == "#/turns?plugin=Ada.kitchen&state=done"
        titles = rows.all_text_contents()
        picture(page, "turns-filtered-360", full_page=True)
        page.reload()
        window.shown()
        assert rows.all_text_contents() == titles
        rows.first.click()
        page.locator(".turn-status").wait_for()
        page.go_back()
        page.get_by_role("heading", name="Turns").wait_for()
        window.shown()
        assert page.evaluate("location.hash") == address and rows.all_text_contents() == titles
        page.get_by_label("Cost at least").fill("1000000")
        page.keyboard.press("Enter")
        page.get_by_text("No turn fits these filters.").wait_for()
        page.get_by_role("button", name="Clear filters").click()
        page.wait_for_function(
            "every => document.querySelectorAll('main .list-link').length === every", arg=every
        )
        window.go("#/turns?since=2026-13-99&min_cost=x")
        page.get_by_role("alert").get_by_text("This could not be loaded").wait_for()
        page.get_by_label("From").fill("2020-05-01T10:00")
        page.get_by_label("Cost at least").fill("0")
        page.keyboard.press("Enter")
        page.wait_for_function(
            "() => /since=2020-0[45]-\\d\\dT.*Z&min_cost=0$/.test(decodeURIComponent(location.hash))"
        )
        rows.first.wait_for()
        window.check()
    # Who is not logged in comes to the same list after the login.
    context = console.browser.new_context(viewport=PHONE)
    try:
        page = context.new_page()
        page.goto(f"{console.url}/console/{address}")
        page.get_by_label("Key").fill(console.key)
        page.keyboard.press("Enter")
        page.get_by_role("heading", name="Turns").wait_for()
        page.locator("main .list-link").first.wait_for()
        assert page.evaluate("location.hash") == address
        assert page.locator("main .list-link").all_text_contents() == titles
    finally:
        context.close()


def test_the_prompt_of_a_round_is_shown_to_keys_with_admin_only(
    console: Console, addresses: dict[str, str], picture: Callable[..., None]
) -> None:
    with console.window(size=PHONE) as window:
        page = window.go(addresses["turn"])
        page.get_by_text("What was sent to the model").first.click()
        page.locator(".prompt h3", has_text="system").first.wait_for()
        said = page.locator(".prompt pre").all_inner_texts()
        assert any("plan tonight's dinner" in text for text in said)
        picture(page, "prompt-360", full_page=True)
        window.check()
    made = console.http.post("keys", json={"name": "reader", "scopes": ["read"]})
    assert made.is_success, made.text
    context = console.browser.new_context(viewport=PHONE)
    try:
        page = context.new_page()
        page.goto(f"{console.url}/console/{addresses['turn']}")
        page.get_by_label("Key").fill(made.json()["key"])
        page.keyboard.press("Enter")
        page.locator(".round").first.wait_for()
        page.locator(".call").first.wait_for()
        assert page.get_by_text("What was sent to the model").count() == 0
    finally:
        context.close()


def test_the_theme_follows_the_system_until_one_is_chosen(console: Console) -> None:
    with console.window(theme="dark") as window:
        page = window.go("#/chats")
        background = "getComputedStyle(document.body).backgroundColor"
        dark = page.evaluate(background)
        page.emulate_media(color_scheme="light")
        page.wait_for_function(f"dark => {background} !== dark", arg=dark)
        light = page.evaluate(background)
        page.get_by_role("button", name="Dark colours").click()
        assert page.evaluate(background) == dark
        page.reload()
        window.shown()
        assert page.evaluate(background) == dark
        page.get_by_role("button", name="System colours").click()
        assert page.evaluate(background) == light
        window.check()
