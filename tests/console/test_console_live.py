"""The console while things happen: calls, output, approvals, configuration, chats, as a person uses them."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from code_model import STORY
from console_world import PHONE, Console
from waiting import wait_until

if TYPE_CHECKING:
    from playwright.sync_api import Route

pytestmark = pytest.mark.extended

LANES = ("methods", "methods", "long", "rounds")
#: Whether a picture of the plugin is drawn.
PICTURE = "() => [...document.querySelectorAll('.picture img')].some(one => one.naturalWidth === 480)"
SLOW = """
for number in range(600):
    print("soup", number)
    simmer(1, name="slow soup")
"""


def test_a_call_is_seen_before_it_ends_with_the_line_that_makes_it(console: Console) -> None:
    with console.window() as window:
        turn = console.say("live", "Cook.", SLOW)
        page = window.go(f"#/turns/{turn}")
        page.locator(".call", has_text="simmer").first.wait_for()
        page.locator(".call[data-tone='busy']", has_text="slow soup: step").wait_for()
        line = page.locator(".code-line.runs")
        line.wait_for()
        assert (line.get_attribute("data-line"), line.inner_text().strip()) == (
            "3",
            'simmer(1, name="slow soup")',
        )
        page.locator("pre.output", has_text="soup 2").wait_for()
        assert console.turn(turn)["state"] == "running"
        # The row of a call that lasts has a button too, which names its job.
        page.get_by_role("button", name="Cancel", exact=True).click()
        page.get_by_role("button", name="Cancel the turn").click()
        page.locator(".turn-status", has_text="Cancelled").wait_for()
        assert console.ended(turn)["state"] == "cancelled"
        assert page.locator(".code-line.runs").count() == 0
        window.check()


def test_a_turn_that_is_open_grows_by_its_follow_up_round_its_files_and_its_job(console: Console) -> None:
    with console.window() as window:
        turn = console.say(
            "growing",
            "Make a stew.",
            "for step in range(3):\n    simmer(0.5)\nphoto('stew.png')\ntaste('stew')",
            "try:\n    burn('too hot')\nexcept Exception as error:\n    print(error)\nbake('rolls')\n"
            "send_msg_text(_ck, 'Ready.')",
        )
        page = window.go(f"#/turns/{turn}")
        page.locator(".turn-status", has_text="Done").wait_for()
        rounds = page.locator(".round")
        rounds.nth(1).wait_for()
        rounds.nth(1).locator(".round-cause", has_text="stew: needs salt").wait_for()
        failed = rounds.nth(1).locator(".call[data-tone='bad']")
        failed.wait_for()
        failed.locator("summary").click()
        failed.locator(".call-body", has_text="RuntimeError: too hot").wait_for()
        page.locator(".from-agent", has_text="Ready.").wait_for()
        page.wait_for_function(
            "() => [...document.querySelectorAll('.picture img')].some(i => i.naturalWidth === 480)"
        )
        job = page.locator(".job", has_text="rolls")
        job.get_by_role("progressbar").wait_for()
        page.locator(".facts", has_text="cost 0.0072").first.wait_for()
        job.get_by_role("button", name="Cancel the job “rolls”", exact=True).click()
        page.locator("dialog").get_by_role("button", name="Cancel the job").click()
        page.locator(".job", has_text=re.compile("Cancelled|Failed")).wait_for()
        window.check()


def test_a_person_talks_with_files_and_sees_the_answer_without_reloading(
    console: Console, tmp_path: Path
) -> None:
    (tmp_path / "shopping list.txt").write_text("carrots")
    with console.window() as window:
        page = window.go("#/chats/talk%2F1")
        page.get_by_label("Message", exact=True).fill(
            "Here is the list.\n```python\nsend_msg_text(_ck, 'I read it.')\nphoto('dish.png')\n```"
        )
        page.locator("input[type=file]").set_input_files(str(tmp_path / "shopping list.txt"))
        page.get_by_role("button", name="Send").click()
        page.locator(".from-person .file", has_text="shopping list.txt").wait_for()
        page.locator(".from-agent", has_text="I read it.").wait_for()
        page.wait_for_function(
            "() => [...document.querySelectorAll('.picture img')].some(i => i.naturalWidth === 480)"
        )
        page.locator(".working").wait_for(state="hidden")
        page.get_by_role("heading", name="Here is the list.", exact=True).wait_for()  # the first words
        page.get_by_role("button", name="Rename").click()
        page.get_by_label("Title").fill("Shopping")
        page.locator("dialog").get_by_role("button", name="Rename").click()
        page.get_by_role("heading", name="Shopping", exact=True).wait_for()
        assert page.title().startswith("Shopping")
        page.locator(".page-head .mono", has_text="talk/1").wait_for()
        page.get_by_role("link", name="How this answer came about").first.click()
        page.locator(".turn-status", has_text="Done").wait_for()
        page.locator(".crumbs a", has_text="Shopping").click()
        page.get_by_role("heading", name="Shopping", exact=True).wait_for()
        window.check()


def test_words_are_shown_while_the_model_writes_them(console: Console, picture: Callable[..., None]) -> None:
    with console.window() as window:
        page = window.go("#/chats/story")
        console.model.hold()
        try:
            page.get_by_label("Message", exact=True).fill(STORY)
            page.get_by_role("button", name="Send").click()
            live = page.locator(".message.is-live", has_text="Once upon a time")
            live.wait_for()
            assert page.locator(".talk-log .from-agent").count() == 0
            picture(page, "words-live")
            window.check()
            with console.window() as other:  # opened midway
                late = other.go("#/chats/story")
                late.locator(".message.is-live", has_text="Once upon a time").wait_for()
                assert "missing" not in late.locator("body").inner_text()
        finally:
            console.model.release()
        page.locator(".talk-log .from-agent", has_text="The end.").wait_for()
        live.wait_for(state="hidden")
        assert page.locator(".talk-log .from-agent").count() == 1


def test_an_approval_is_decided_on_a_phone_and_the_call_runs_once(console: Console) -> None:
    with console.window(size=PHONE, has_touch=True, is_mobile=True) as window:
        page = window.go("#/approvals")
        page.get_by_text("Nothing waits for you").wait_for()
        console.say("shop", "Order carrots.", "order('carrots', amount=3)")  # it appears without reloading
        page.get_by_role("link", name="Ada.kitchen.order('carrots', amount=3)").tap()
        card = page.locator(".approval")
        card.locator(".code", has_text="amount=3").wait_for()
        page.get_by_text("Change the arguments").tap()
        page.get_by_label("Arguments").fill('{"args": ["carrots"], "kwargs": {"amount": 2}}')
        page.get_by_label("Reason").fill("three are too many")
        assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
        page.get_by_role("button", name="Approve").tap()
        page.locator(".badge", has_text="Approved").wait_for()
        card.get_by_text("three are too many").wait_for()
        card.locator("dd .badge", has_text="Done").wait_for()
        (decided,) = console.http.get("approvals", params={"chat_key": "shop"}).json()["items"]
        assert (decided["state"], decided["is_edited"]) == ("approved", True)
        assert decided["decided_by"].startswith("key:")
        page.get_by_role("button", name="Menu").tap()
        page.locator(".sidebar.is-open").wait_for()
        window.check()


def test_a_turn_that_waits_for_a_person_says_so_until_the_decision(console: Console) -> None:
    with console.window() as window:
        turn = console.say("wanted", "Order mint.", "order('mint')", wait=30)
        page = window.go(f"#/turns/{turn}")
        page.locator(".turn-status", has_text="Needs approval").wait_for()
        (asked,) = console.http.get("approvals", params={"chat_key": "wanted"}).json()["items"]
        answer = console.http.post(f"approvals/{asked['id']}/decision", json={"decision": "approve"})
        assert answer.is_success, answer.text
        page.locator(".turn-status", has_text="Done").wait_for()
        window.check()


def test_the_answer_to_a_decision_that_comes_late_does_not_bring_back_what_was(console: Console) -> None:
    with console.window() as window:
        console.say("late", "Order leeks.", "order('leeks')")
        page = window.go("#/approvals")
        held: list[Route] = []
        page.route("**/decision", lambda route: held.append(route))
        page.locator(".list-link", has_text="late").click()
        page.get_by_role("button", name="Approve").click()
        wait_until(lambda: page.wait_for_timeout(20) or bool(held))
        response = held[0].fetch()
        card = page.locator(".approval")
        card.locator("dd .badge", has_text="Done").wait_for()
        held[0].fulfill(response=response)
        page.get_by_text("Approved. It runs now.").wait_for()
        assert card.locator("dd .badge", has_text="Done").is_visible()
        window.check()


def test_a_call_is_approved_or_denied_in_its_chat(console: Console) -> None:
    with console.window() as window:
        page = window.go("#/chats/denied")
        console.say("denied", "Order salt.", "order('salt')")
        page.locator(".approval").get_by_role("button", name="Deny").click()
        page.locator(".approval").wait_for(state="detached")
        (decided,) = console.http.get("approvals", params={"chat_key": "denied"}).json()["items"]
        assert decided["state"] == "denied"
        page = window.go("#/chats/agreed")
        console.say("agreed", "Order pepper.", "order('pepper')")
        page.locator(".approval", has_text="order('pepper')").get_by_role("button", name="Approve").click()
        page.locator(".approval").wait_for(state="detached")
        (decided,) = console.http.get("approvals", params={"chat_key": "agreed"}).json()["items"]
        assert (decided["state"], decided["summary"]) == ("approved", "Ada.kitchen.order('pepper')")
        window.check()


def test_a_message_sent_before_the_chat_is_loaded_stays(console: Console) -> None:
    with console.window() as window:
        page = window.page
        held: list[Route] = []
        page.route("**/chats/early/events*", lambda route: held.append(route))
        page.goto(f"{console.url}/console/#/chats/early")
        page.get_by_label("Message", exact=True).fill("before the stream")
        page.get_by_role("button", name="Send").click()
        sent = page.locator(".talk-entry", has_text="before the stream")
        sent.wait_for()
        # Nothing may take "loading" away before messages, jobs and approvals were read.
        assert page.locator("main .loading").count() == 1
        wait_until(lambda: page.wait_for_timeout(20) or bool(held))
        held[0].continue_()
        window.shown()
        assert sent.count() == 1
        window.check()


def test_an_edit_of_a_configuration_reaches_every_worker(console: Console) -> None:
    with console.window() as window:
        page = window.go("#/plugins/Ada.kitchen")
        page.get_by_label("Most dishes").fill("7")
        page.get_by_label("Shop token").fill("s3cret-token")
        page.get_by_role("group", name="Oven").get_by_label("Password").fill("hunter2")
        page.get_by_role("button", name="Save").click()
        page.get_by_text("Every worker uses it").wait_for()
        assert page.get_by_label("Shop token").input_value() == ""
        assert page.get_by_label("Shop token").get_attribute("placeholder") == "Set; type to replace it"
        assert "s3cret-token" not in page.content()
        config = console.http.get("plugins/Ada.kitchen/config").json()
        assert (config["values"]["LIMIT"], config["secrets"]) == (7, {"TOKEN": True, "OVEN.password": True})
        assert config["values"]["OVEN"] == {"url": "http://oven.local"}
        answered: set[str] = set()

        def everywhere() -> bool:
            call = console.call("Ada.kitchen.limit")
            assert call["value"] == 7
            answered.add(call["worker"])
            return len(answered) == 2

        wait_until(everywhere, what="an answer of both workers")
        page.get_by_label("Most dishes").fill("11")
        page.get_by_role("button", name="Save").click()
        assert page.get_by_label("Most dishes").evaluate("one => !one.validity.valid")
        window.check()


def test_a_method_is_tried_with_a_form_from_its_signature(console: Console) -> None:
    with console.window() as window:
        page = window.go("#/plugins/Ada.kitchen")
        method = page.locator(".method", has_text="recipe")
        method.locator("summary").click()
        method.get_by_label("name", exact=True).fill("soup")
        method.get_by_label("portions").fill("3")
        method.get_by_label("is_vegan").check()
        method.get_by_role("button", name="Try it").click()
        result = method.get_by_role("group", name="Result")
        result.wait_for()
        assert '"grams": 360' in result.inner_text() and '"is_vegan": true' in result.inner_text()
        other = page.locator(".method", has_text="simmer")
        other.locator("summary").click()
        other.get_by_role("button", name="Try it").click()
        other.get_by_text("seconds is missing").wait_for()
        window.check()


def test_a_plugin_is_disabled_and_enabled(console: Console) -> None:
    with console.window() as window:
        page = window.go("#/plugins/nekro.notes")
        page.get_by_role("button", name="Disable").click()
        page.locator("dialog").get_by_role("button", name="Disable").click()
        page.get_by_role("button", name="Enable").click()
        page.get_by_role("button", name="Disable").wait_for()
        window.check()


def test_a_key_is_shown_once_and_revoked(console: Console) -> None:
    with console.window() as window:
        page = window.go("#/keys")
        page.get_by_role("button", name="New key").click()
        page.get_by_label("Name").fill("for a site")
        page.get_by_role("button", name="Create").click()
        secret = page.get_by_label("Key", exact=True).input_value()
        assert secret.startswith("nk_")
        page.get_by_role("button", name="I have copied it").click()
        row = page.get_by_role("row").filter(has_text="for a site")
        row.wait_for()
        assert secret not in page.content()
        row.get_by_role("button", name="Revoke").click()
        page.locator("dialog").get_by_role("button", name="Revoke").click()
        row.get_by_text("Revoked").wait_for()
        window.check()


def test_a_turn_is_run_again_in_a_new_chat(console: Console) -> None:
    first = console.say("first", "Say it.", "send_msg_text(_ck, 'said')", wait=60)
    with console.window() as window:
        page = window.go(f"#/turns/{first}")
        page.get_by_role("button", name="Run again…").click()
        page.locator("dialog").get_by_role("button", name="Run").click()
        page.wait_for_function(
            "old => location.hash.startsWith('#/turns/') && !location.hash.endsWith(old)", arg=first
        )
        page.locator(".turn-status", has_text="Done").wait_for()
        page.locator(".from-agent", has_text="said").wait_for()
        again = console.turn(page.evaluate("location.hash").removeprefix("#/turns/"))
        assert again["chat_key"] != "first"
        window.check()


ASK = """
choice = ask_user("Which pan?", ["the small one", "the big one"])
send_msg_text(_ck, f"Frying in {choice}.")
"""


def test_a_question_is_answered_by_a_button_in_its_chat(console: Console) -> None:
    turn = console.say("pans", "Fry something.", ASK)
    console.ended(turn)
    with console.window() as window:
        page = window.go("#/operations")
        waiting = page.locator("tr", has_text="programs that wait").locator("[data-label='Waiting']")
        waiting.filter(has_text="1").wait_for()
        page = window.go("#/chats/pans")
        card = page.locator(".wait", has_text="Which pan?")
        card.get_by_text("for ada").wait_for()
        card.get_by_role("button", name="the big one").click()
        page.locator(".from-agent", has_text="Frying in the big one.").wait_for()
        card.wait_for(state="detached")
        answer = page.locator(".from-person", has_text="the big one").last
        assert answer.locator(".message-name").inner_text() == "ada"
        window.check()
    assert console.ended(turn)["state"] == "done"


def test_a_question_without_choices_is_answered_on_the_page_of_its_turn(console: Console) -> None:
    turn = console.say("names", "Name it.", 'send_msg_text(_ck, "Named " + ask_user("Which name?"))')
    console.ended(turn)
    with console.window(size=PHONE) as window:
        page = window.go(f"#/turns/{turn}")
        page.locator(".turn-status", has_text="Waiting").wait_for()
        page.get_by_label("Answer").fill("Goulash")
        page.get_by_label("Answer").press("Enter")
        page.locator(".turn-status", has_text="Done").wait_for()
        page.locator(".wait").wait_for(state="detached")
        page = window.go("#/chats/names")
        page.locator(".from-agent", has_text="Named Goulash").wait_for()
        window.check()


@pytest.mark.parametrize("way", ["Cancel", "Stop", "New conversation"])
def test_a_program_that_waits_is_ended_from_the_console(console: Console, way: str) -> None:
    chat = f"ended-{way.split()[0].lower()}"
    turn = console.say(chat, "Wait.", 'ask_user("Still there?")\nsend_msg_text(_ck, "It went on.")')
    console.ended(turn)
    with console.window() as window:
        page = window.go(f"#/turns/{turn}" if way == "Cancel" else f"#/chats/{chat}")
        page.locator(".wait", has_text="Still there?").wait_for()
        page.get_by_role("button", name=way).first.click()
        confirms = {"Cancel": "Cancel the turn", "New conversation": "Begin a new one"}
        if way in confirms:
            page.locator("dialog").get_by_role("button", name=confirms[way]).click()
        else:
            page.get_by_text("The agent is stopped.").wait_for()
        page.locator(".wait").wait_for(state="detached")
        window.check()
    assert console.turn(turn)["state"] == "cancelled"
    console.ended(console.say(chat, "Yes."))  # answers nothing: it begins a turn of its own
    said = [one["text"] for one in console.http.get(f"chats/{chat}/messages").json()["items"]]
    assert "It went on." not in said


def test_a_turn_goes_on_from_a_call_in_a_new_chat(console: Console) -> None:
    code = """
import random
note("menu.txt", f"soup of {random.random()}")
print(weigh(random.random()))
send_msg_text(_ck, "It is on the menu.")
dish = weigh("stew")
send_msg_text(_ck, f"Served: {dish}.")
"""
    turn = console.say("kitchen", "Cook.", code)
    console.ended(turn)
    with console.window() as window:
        page = window.go(f"#/turns/{turn}")
        call = page.locator("details.call", has_text="weigh").nth(1)
        call.locator("summary").click()
        call.get_by_role("button", name="Continue from here").click()
        page.locator("dialog").get_by_role("button", name="Continue").click()
        page.wait_for_function(
            "turn => location.hash.startsWith('#/turns/') && !location.hash.includes(turn)", arg=turn
        )
        page.locator(".turn-status", has_text="Done").wait_for()
        window.check()
        new = page.url.rpartition("/")[2]
    before, after = console.turn(turn), console.turn(new)
    assert after["chat_key"].startswith("kitchen-from-")
    assert [one["code"] for one in after["rounds"]] == [one["code"] for one in before["rounds"]]
    outputs = [one["output"] for one in before["rounds"]], [one["output"] for one in after["rounds"]]
    assert outputs[0] == outputs[1] and after["rounds"][0]["model_tries"] is None
    values = [[one["value"] for one in tree["rounds"][0]["calls"]] for tree in (before, after)]
    assert values[0] == values[1]
    said = [one["text"] for one in console.http.get(f"chats/{after['chat_key']}/messages").json()["items"]]
    assert [said.count(text) for text in ("It is on the menu.", "Served: stew.")] == [1, 1]
