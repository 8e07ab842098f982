"""Lists show changes made elsewhere, request nothing without a change, and show a lost connection."""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from console_world import Console, Watched
from gateway_process import GatewayProcess
from test_console_operating import give_up
from waiting import wait_until

pytestmark = pytest.mark.extended

LANES = ("methods", "long", "rounds")
STREAM = "/api/v1/changes"
#: Of a message that starts no turn.
SILENT = {"user_id": "ada", "to_agent": False}
PAGES = (
    "chats",
    "jobs",
    "approvals",
    "timers",
    "plugins",
    "plugins/Ada.kitchen",
    "mcp",
    "operations",
    "costs",
    "keys",
)


@pytest.fixture(scope="module")
def elsewhere(console: Console) -> Iterator[GatewayProcess]:
    """A second gateway, through which things happen that the console's gateway is not asked for."""
    with GatewayProcess(console.fleet) as gateway:
        yield gateway


def post(console: Console, gateway: GatewayProcess, path: str, body: dict[str, Any]) -> dict[str, Any]:
    headers = {"Idempotency-Key": uuid.uuid4().hex}
    answer = console.http.post(f"{gateway.url}/api/v1/{path}", json=body, headers=headers)
    assert answer.is_success, answer.text
    return dict(answer.json())


def call(console: Console, gateway: GatewayProcess, method: str, chat_key: str, **kwargs: Any) -> None:
    post(console, gateway, "calls", {"method": method, "chat_key": chat_key, "kwargs": kwargs})


@contextmanager
def never_reloaded(window: Watched) -> Iterator[None]:
    window.page.evaluate("() => { window.__same = true }")
    yield
    assert window.page.evaluate("() => window.__same") is True
    window.check()


def live(window: Watched, address: str) -> Any:
    """Go to a page, and wait until its tab is connected."""
    streams: list[Any] = []
    window.page.on("response", lambda answer: streams.append(answer) if STREAM in answer.url else None)
    page = window.go(address)
    wait_until_in(page, lambda: bool(streams))
    return page


def wait_until_in(page: Any, condition: Any) -> None:
    """Wait for something that the browser's messages bring about."""
    wait_until(lambda: condition() or page.wait_for_timeout(50))


def test_a_job_a_timer_an_approval_and_a_chat_of_another_gateway_appear(
    console: Console, elsewhere: GatewayProcess
) -> None:
    with console.window() as window:
        page = live(window, "#/jobs")
        with never_reloaded(window):
            call(console, elsewhere, "bake", "kitchen-7", name="bread")
            job = page.locator(".job", has_text="bread")
            job.wait_for()
            cancel = job.get_by_role("button", name="Cancel")
            cancel.focus()
            call(console, elsewhere, "bake", "kitchen-7", name="rolls")
            page.locator(".job", has_text="rolls").wait_for()
            # The list was drawn again around the focus.
            assert page.evaluate("() => document.activeElement.dataset.key").startswith("cancel-")
            window.go("#/timers")
            call(console, elsewhere, "remind", "kitchen-8", text="turn the oven off")
            page.get_by_role("row").filter(has_text="turn the oven off").wait_for()
            window.go("#/chats")
            post(console, elsewhere, "chats/kitchen-9/messages", {"text": "news", **SILENT})
            page.get_by_role("link", name="kitchen-9").wait_for()
            window.go("#/approvals")
            page.get_by_text("Nothing waits for you").wait_for()
            text = "Order.\n```python\norder('salt')\n```"
            post(console, elsewhere, "chats/kitchen-9/messages", {"text": text, "user_id": "ada"})
            page.get_by_role("link", name="Ada.kitchen.order").wait_for()
            page.locator(".nav-link .count", has_text="1").wait_for()
            page.get_by_role("link", name="Ada.kitchen.order").click()
            page.get_by_role("heading", name="Ada.kitchen.order").wait_for()
            (waiting,) = console.http.get("approvals", params={"state": "pending"}).json()["items"]
            post(console, elsewhere, f"approvals/{waiting['id']}/decision", {"decision": "deny"})
            page.locator(".approval .badge", has_text="Denied").wait_for()
            page.locator(".nav-link .count").wait_for(state="hidden")


def test_a_worker_a_dead_letter_a_queue_and_a_key_come_and_go(
    console: Console, elsewhere: GatewayProcess
) -> None:
    with console.window() as window:
        page = live(window, "#/operations")
        with never_reloaded(window):
            workers = page.get_by_role("table", name="Workers").get_by_role("row")
            before = workers.count()
            (worker,) = console.fleet.start("methods")
            row = workers.filter(has_text=f"process {worker.pid}")
            row.wait_for()
            letter = give_up(console, "Ada.kitchen.limit")
            letters = page.get_by_role("table", name="Dead letters")
            letters.get_by_role("row").filter(has_text=letter).wait_for()
            page.get_by_text("1 dead letter").wait_for()
            worker.kill()
            row.wait_for(state="detached")
            assert workers.count() == before
            console.http.delete(f"{elsewhere.url}/api/v1/dead-letters/{letter}").raise_for_status()
            page.get_by_text("No dead letters").wait_for()
            acts = page.get_by_role("table", name="Administrative acts").get_by_role("row")
            acts.filter(has_text="dead_letter.drop").filter(has_text=letter).wait_for()
            window.go("#/keys")
            made = post(console, elsewhere, "keys", {"name": "till", "scopes": ["read"]})
            key = page.get_by_role("row").filter(has_text="till")
            key.wait_for()
            console.http.delete(f"{elsewhere.url}/api/v1/keys/{made['id']}").raise_for_status()
            key.filter(has_text="Revoked").wait_for()
            window.go("#/mcp")
            body = {"declaration": {"command": "true"}, "is_enabled": False}
            console.http.put(f"{elsewhere.url}/api/v1/mcp/servers/clock", json=body).raise_for_status()
            page.get_by_role("heading", name="clock").wait_for()
            page.get_by_text("Declaration").click()
            page.locator("details[open]").wait_for()
            for path in ("disable", "enable"):
                window.go("#/mcp")
                window.go("#/plugins")
                post(console, elsewhere, f"plugins/Ada.kitchen/{path}", {})
                plugin = page.get_by_role("link", name="Ada.kitchen")
                plugin.filter(has_text="Disabled" if path == "disable" else "OK").wait_for()


def test_an_idle_page_asks_for_nothing(console: Console) -> None:
    with console.window() as window:
        asked: list[str] = []
        ended: list[str] = []
        page = window.page
        page.on("request", lambda one: asked.append(one.url))
        for name in ("requestfinished", "requestfailed"):
            page.on(name, lambda one: ended.append(one.url))
        # Timers of the page go by this clock, so a minute of them takes no minute.
        page.clock.install()
        live(window, "#/chats")
        for area in PAGES:
            window.go(f"#/{area}")
            settle(page, asked, ended)
            del asked[:]
            page.clock.run_for(60_000)
            # What the gateway finds changed within some seconds would be asked for now.
            page.wait_for_timeout(3_000)
            assert asked == [], area
        window.check()


def settle(page: Any, asked: list[str], ended: list[str]) -> None:
    """Wait until a page has read what it shows: nothing but streams is under way, and nothing new begins."""

    def is_quiet() -> bool:
        count = len(asked)
        page.wait_for_timeout(1_500)
        under_way = [one for one in asked if one not in ended and STREAM not in one]
        return count == len(asked) and not under_way

    wait_until(is_quiet, what="the page is quiet")


def test_a_lost_connection_is_shown_and_what_happened_meanwhile_is_read(
    console: Console, elsewhere: GatewayProcess
) -> None:
    with console.window() as window:
        page = live(window, "#/jobs")
        with never_reloaded(window):
            assert page.locator(".live-state").count() == 1
            console.gateway.kill()
            page.locator(".live-state", has_text="The connection is lost; trying again").wait_for()
            call(console, elsewhere, "bake", "kitchen-6", name="late buns")
            console.gateway.start()
            console.gateway.wait_ready()
            page.locator(".job", has_text="late buns").wait_for()
            page.wait_for_function("() => document.querySelector('.live-state').textContent === ''")


def test_a_list_keeps_its_further_pages_when_it_changes(console: Console, elsewhere: GatewayProcess) -> None:
    for number in range(55):
        post(console, elsewhere, f"chats/many-{number}/messages", {"text": "old", **SILENT})
    with console.window() as window:
        page = live(window, "#/chats")
        with never_reloaded(window):
            page.get_by_role("button", name="Show more").click()
            first = page.get_by_role("link", name="many-0 ")
            first.wait_for()
            post(console, elsewhere, "chats/many-new/messages", {"text": "x", **SILENT})
            page.get_by_role("link", name="many-new").wait_for()
            assert first.count() == 1 and page.locator(".list-link").count() > 55
        # A change that comes while more is read.
        window.go("#/jobs")
        page = window.go("#/chats")
        held: list[Any] = []
        further = re.compile(r"/api/v1/chats\?.*cursor=")
        page.route(further, lambda route: route.continue_() if held else held.append(route))
        with page.expect_request(further):
            page.get_by_role("button", name="Show more").click()
        post(console, elsewhere, "chats/many-newer/messages", {"text": "x", **SILENT})
        page.get_by_role("link", name="many-newer").wait_for()
        held[0].continue_()
        page.get_by_role("link", name="many-0 ").wait_for()


def test_a_key_that_is_revoked_leads_to_the_login(console: Console, elsewhere: GatewayProcess) -> None:
    made = post(console, elsewhere, "keys", {"name": "leaver", "scopes": ["read", "admin"]})
    context = console.browser.new_context()
    try:
        page = context.new_page()
        page.goto(f"{console.url}/console/")
        page.get_by_label("Key").fill(made["key"])
        page.get_by_role("button", name="Log in").click()
        page.get_by_role("heading", name="Chats").wait_for()
        console.http.delete(f"{elsewhere.url}/api/v1/keys/{made['id']}").raise_for_status()
        page.get_by_label("Key").wait_for()  # without a click
    finally:
        context.close()
