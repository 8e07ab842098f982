"""Pages for what a system costs, where its traces are, and what is done about messages that failed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import redis
from code_model import UNREPORTED
from console_world import PHONE, Console, Watched
from trace_collector import Collector

from broker_config.app import create_app
from broker_config.keys import Keys
from nekro.broker.delivery.messages import CallMessage
from nekro.broker.delivery.transport import DELIVERIES_HEADER
from nekro.broker.publishing import encode_message
from nekro.wire.invocation import Invocation, Signer, new_id
from nekro_agent.methods import SandboxMethodType

pytestmark = pytest.mark.extended

SETTINGS = {
    "tracing": {"enabled": True, "url_template": "http://127.0.0.1:9/traces/{trace_id}?view=<b>turn"},
    "budgets": {"chat": {"rounds": 2, "cost": 1.0}, "day": {"tokens": 1_000_000}},
}


@pytest.fixture(scope="module", autouse=True)
def collector() -> Iterator[Collector]:
    """Receives the spans of the file's workers."""
    with pytest.MonkeyPatch.context() as patch:
        collector = Collector()
        patch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
        yield collector
        collector.close()


@pytest.fixture(scope="module")
def turn(collector: Collector, console: Console) -> dict[str, Any]:
    """A turn of two rounds that used all rounds of its chat."""
    code = ("weigh('carrots')\ntaste('stew')", "send_msg_text(_ck, 'It needs salt.')")
    turn = console.say("costly", "Cook a stew.", *code, wait=60)
    assert console.ended(turn)["state"] == "done"
    other = console.say("cheap", f"{UNREPORTED}, say it.", "send_msg_text(_ck, 'said')", wait=60)
    assert console.ended(other)["state"] == "done"
    return console.turn(turn)


def rows_of(window: Watched) -> list[list[str]]:
    """The texts of the cells of the page's first table."""
    rows: list[list[str]] = window.page.evaluate(
        "() => [...document.querySelector('main table').tBodies[0].rows]"
        ".map(row => [...row.cells].map(cell => cell.innerText.trim()))"
    )
    return rows


@pytest.mark.parametrize("size", [{"width": 1280, "height": 860}, PHONE], ids=["desktop", "phone"])
def test_costs_are_shown_as_the_api_sums_them_with_the_budgets(
    console: Console, turn: dict[str, Any], picture: Callable[..., None], size: dict[str, int]
) -> None:
    summed = console.http.get("costs", params={"by": "chat"}).json()
    by_chat = {one["key"]: one for one in summed["items"]}
    assert by_chat["costly"]["rounds"] == 2
    assert [by_chat[key]["estimated_requests"] for key in ("costly", "cheap")] == [0, 1]
    with console.window(size=size) as window:
        page = window.go("#/costs?by=chat")
        picture(page, f"costs-chat-{size['width']}", full_page=True)
        shown = {row[0]: row for row in rows_of(window)}
        assert shown.keys() == by_chat.keys()
        for key, one in by_chat.items():
            names = ("prompt_tokens", "completion_tokens", "estimated_requests", "rounds")
            assert shown[key][3:7] == [f"{one[name]:,}" if one[name] else "–" for name in names]
            assert float(shown[key][2]) == pytest.approx(one["cost"], rel=0.05)
        assert "Tokens and cost of 1 request are estimated" in page.locator("main").inner_text()
        estimated = page.locator(".budget", has_text="chat cheap").filter(has_text="cost on")
        assert "1 request estimated" in estimated.inner_text()
        spent = page.locator(".budget", has_text="chat costly").filter(has_text="rounds on")
        assert "2 of 2 (100 %)" in spent.inner_text()
        assert len(page.locator(".budget").all()) == len(summed["budgets"])
        for by in ("day", "plugin", "model", "user", "key"):
            page.get_by_label("Per", exact=True).select_option(by)
            window.page.wait_for_function(
                "by => document.querySelector('main table caption')?.textContent === `Costs per ${by}`",
                arg=by,
            )
            window.shown()
            items = console.http.get("costs", params={"by": by}).json()["items"]
            assert sorted(row[0] for row in rows_of(window)) == sorted(one["key"] or "–" for one in items), by
        page.get_by_label("Bars show").select_option("tokens")
        window.shown()
        assert page.evaluate("document.documentElement.scrollWidth") <= size["width"]
        page.get_by_label("Per", exact=True).select_option("chat")
        page.get_by_role("link", name="costly").click()
        page.get_by_role("heading", name="Cook a stew.").wait_for()
        window.check()


def test_a_click_is_not_lost_when_a_newer_list_comes_while_the_button_is_pressed(
    console: Console, turn: dict[str, Any]
) -> None:
    held: list[Any] = []
    with console.window() as window:
        page = window.go("#/costs?by=chat")
        page.route("**/api/v1/costs?*", lambda route: held.append(route))
        console.say("another", "Say it.", "send_msg_text(_ck, 'said')", wait=60)
        while not held:  # the test's own limit ends it
            page.wait_for_timeout(50)
        page.get_by_role("link", name="costly").hover()
        page.mouse.down()
        with page.expect_response("**/api/v1/costs?*"):
            held[0].continue_()
        page.wait_for_timeout(300)
        page.mouse.up()
        page.get_by_role("heading", name="Cook a stew.").wait_for()
        window.check()


def test_a_turn_links_to_its_trace(
    console: Console, turn: dict[str, Any], collector: Collector, picture: Callable[..., None]
) -> None:
    trace = turn["trace_id"]
    assert turn["trace_url"] == SETTINGS["tracing"]["url_template"].replace("{trace_id}", trace)  # type: ignore[attr-defined]
    with console.window() as window:
        page = window.go(f"#/turns/{turn['id']}")
        link = page.get_by_role("link", name="Trace")
        assert link.get_attribute("href") == turn["trace_url"]
        assert (link.get_attribute("target"), link.get_attribute("rel")) == ("_blank", "noreferrer")
        picture(page, "turn-with-trace")
        window.check()
    assert collector.of_trace(bytes.fromhex(trace))


def drop_tool_calls(console: Console, turn_id: str) -> None:
    """Make the events of a turn those of a worker of 0.2.0 that kept no calls of tools."""
    with console.database() as database:
        database.execute(
            """UPDATE chat_events SET data = '{"tool_calls_kept": false, ' || substr(data, 2)
            WHERE turn_id = ? AND type = 'code.ready'""",
            (turn_id,),
        )
        database.execute(
            """DELETE FROM chat_events WHERE turn_id = ? AND type LIKE 'call.%'
            AND json_extract(data, '$.type') = ?""",
            (turn_id, SandboxMethodType.TOOL.value),
        )


def test_a_turn_whose_tool_calls_are_not_kept_says_so(console: Console, turn: dict[str, Any]) -> None:
    note = "Calls of tools are kept for a share of the turns."
    drop_tool_calls(console, turn["id"])
    with console.window() as window:
        page = window.go(f"#/turns/{turn['id']}")
        page.locator(".call", has_text="weigh").wait_for()
        assert page.locator(".round", has_text=note).count() == 2
        assert "carrots" not in page.locator(".call", has_text="weigh").inner_text()
        live = console.say("sampled", "Wait.", "simmer(600)")
        window.go(f"#/turns/{live}").locator(".call", has_text="simmer").wait_for()
        drop_tool_calls(console, live)
        window.go("#/chats")
        page = window.go(f"#/turns/{live}")
        page.get_by_text(note).wait_for()
        assert console.turn(live)["state"] == "running"
        console.http.post(f"turns/{live}/cancel").raise_for_status()
        assert console.ended(live)["state"] == "cancelled"
        window.check()


def give_up(console: Console, method: str, *, seconds: float = 600) -> str:
    """Put a signed call among the dead letters, as a worker that gives up; returns its id."""
    settings = console.fleet.settings
    assert settings.security.signing_key is not None
    now = datetime.now(UTC)
    invocation = Invocation(
        call_id=new_id(), method=method, chat_key="letters", container_key="box", user_id="u", issued_at=now,
        deadline=now + timedelta(seconds=seconds), args="",
    )  # fmt: skip
    signer = Signer.from_text(settings.security.signing_key.get_secret_value())
    call = CallMessage.of(invocation, signer=signer, lane="methods", reply_to=new_id())
    app = create_app(settings)
    message = json.loads(encode_message(call.build(app), queue="methods"))
    message["headers"][DELIVERIES_HEADER] = 3
    with redis.Redis.from_url(str(settings.broker.url)) as client:
        client.lpush(Keys(prefix=settings.broker.key_prefix).dead, json.dumps(message))
    return invocation.call_id


def test_dead_letters_are_retried_and_dropped_and_the_page_says_who_did_it(
    console: Console, picture: Callable[..., None]
) -> None:
    retried, dropped = give_up(console, "Ada.kitchen.limit"), give_up(console, "Ada.kitchen.burn")
    key_id = console.key.split("_")[1]
    with console.window() as window:
        page = window.go("#/operations")
        letters = page.get_by_role("table", name="Dead letters")
        first, second = (letters.get_by_role("row").filter(has_text=one) for one in (retried, dropped))
        first.wait_for()
        second.wait_for()
        picture(page, "dead-letters", full_page=True)
        first.get_by_role("button", name="Retry").click()
        dialog = page.locator("dialog[open]")
        dialog.get_by_text("Signature: valid").wait_for()
        dialog.get_by_label("Time limit in seconds").fill("60")
        picture(page, "dead-letter-retry")
        dialog.get_by_role("button", name="Retry").click()
        first.wait_for(state="detached")
        second.get_by_role("button", name="Drop").click()
        dialog.get_by_role("button", name="Drop").click()
        second.wait_for(state="detached")
        acts = page.get_by_role("table", name="Administrative acts").get_by_role("row")
        for action, letter in (("dead_letter.retry", retried), ("dead_letter.drop", dropped)):
            row = acts.filter(has_text=action).filter(has_text=letter)
            row.get_by_role("link", name=f"key {key_id}").wait_for()
        picture(page, "dead-letters-after", full_page=True)
        window.check()
    assert console.http.get("dead-letters").json()["items"] == []
    audit = console.http.get("audit").json()["items"]
    acts_done = {(one["action"], one["subject"], one["key_id"]) for one in audit}
    assert {("dead_letter.retry", retried, key_id), ("dead_letter.drop", dropped, key_id)} <= acts_done


def test_a_letter_that_is_not_valid_is_not_sent_again(console: Console) -> None:
    broker = console.fleet.settings.broker
    with redis.Redis.from_url(str(broker.url)) as client:
        client.lpush(Keys(prefix=broker.key_prefix).dead, b"no message")
    (letter,) = console.http.get("dead-letters").json()["items"]
    with console.window() as window:
        page = window.go("#/operations")
        page.get_by_role("button", name="Retry").click()
        dialog = page.locator("dialog[open]")
        dialog.get_by_text("Signature: not valid").wait_for()
        dialog.get_by_role("button", name="Retry").click()
        dialog.get_by_role("alert").wait_for()
        dialog.get_by_role("button", name="Cancel").click()
        page.get_by_role("button", name="Drop").wait_for()
        window.check()
    assert [one["id"] for one in console.http.get("dead-letters").json()["items"]] == [letter["id"]]
