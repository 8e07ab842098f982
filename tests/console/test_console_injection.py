"""Texts of people, models, plugins, sandboxes and servers try to be markup in every field.

Each attempt names its place, so a text that is interpreted says where. An attempt counts only if a page has
shown it as text.
"""

from __future__ import annotations

import json
import sqlite3
from typing import Any
from urllib.parse import quote

import pytest
import redis
from console_world import Console
from waiting import wait_until

from broker_config.keys import Keys

pytestmark = pytest.mark.extended

#: Other forms of attempts than ``attack`` has.
FORMS = {
    "message-script": "<script>alert('message-script')</script>",
    "message-svg": "<svg onload=\"alert('message-svg')\"><animate onbegin=alert(1)>",
    "message-iframe": "<iframe srcdoc=\"<script>parent.alert('message-iframe')</script>\"></iframe>",
    "message-link": "[x](javascript:alert('message-link')) javascript:alert(1)",
    "message-entity": "&lt;img src=x onerror=alert('message-entity')&gt;",
    "message-template": "{{constructor.constructor('alert(1)')()}} message-template",
    "message-style": "<style>body{display:none}</style> message-style",
    "message-base": "<base href='https://evil.example/'> message-base",
    "message-form": "<form action='https://evil.example/'><input name=message-form onfocus=alert(1)>",
    "message-object": "<object data='https://evil.example/message-object'></object>",
    "message-meta": "<meta http-equiv=refresh content='0;url=https://evil.example/message-meta'>",
    "message-comment": "<!--><img src=x onerror=alert('message-comment')>-->",
    "message-attribute": "\"' onmouseover=alert('message-attribute') x=\"",
    "message-details": "<details open ontoggle=alert('message-details')>",
    "message-fence": "```html\n<img src=x onerror=alert('message-fence')>\n```",
}


#: What a page shows of an attempt that does not have the form of ``attack``.
SEEN = FORMS | {
    "message-fence": "<img src=x onerror=alert('message-fence')>",
    "code-comment": "<script>alert('code-comment')</script>",
    "code-string": "alert('code-string')",
    "agent-link": "[x](javascript:alert('agent-link'))",
    "agent-data": "[x](data:text/html,agent-data)",
    "agent-picture": "Picture: agent-picture",
    "agent-svg": "<svg onload=alert('agent-svg')>",
    "file-name": "onerror=alert('file-name')",
    "approval-argument": "onerror=alert('approval-argument')",
    "signature": "<script>alert('signature')</script>",
    "method-doc": "<script>alert('method-doc')</script>",
}


def attack(place: str) -> str:
    """The text of the plugin ``hostile`` for a place."""
    return f"<img src=x onerror=\"alert('{place}')\"><b id=injected>{place}</b>"


CHAT = attack("chat-key")
CODE = """
# <script>alert('code-comment')</script>
text = "<img src=x onerror=\\"alert('code-string')\\"><b id=injected>code-string</b>"
print(text.replace("code-string", "output"))
weigh_it(text.replace("code-string", "argument"))
weigh_it(value={text.replace("code-string", "argument-key"): text.replace("code-string", "result")})
creep(text.replace("code-string", "progress"))
try:
    explode(text.replace("code-string", "error"))
except Exception:
    pass
send_msg_text(_ck, text.replace("code-string", "agent-message"))
send_msg_text(_ck, "[x](javascript:alert('agent-link')) [x](data:text/html,agent-data)")
send_msg_text(_ck, "![agent-picture](https://evil.example/x.png) | <svg onload=alert('agent-svg')>")
send("<img src=x onerror=alert('file-name')>.txt", "x")
send("picture.svg", "<svg xmlns='http://www.w3.org/2000/svg'><script>alert('svg-file')</script></svg>")
send("fake.png", "<script>alert('fake-picture')</script>")
remind(text.replace("code-string", "timer"))
lurk()
whisper(text.replace("code-string", "observation"))
"""
LAST = """
buy("<img src=x onerror=alert('approval-argument')>")
"""
#: Places by the page that shows them.
SHOWN = {
    "turn": (
        *FORMS, "code-comment", "code-string", "output", "argument", "argument-key", "result", "error",
        "agent-message", "agent-link", "agent-data", "agent-picture", "agent-svg", "file-name", "observation",
        "sender-name", "job-message", "job-name", "chat-key",
    ),
    "talk": (
        *FORMS, "agent-message", "agent-link", "agent-data", "agent-picture", "agent-svg", "file-name",
        "sender-name", "chat-key", "job-message", "approval-argument",
    ),
    "chats": ("chat-key",),
    "jobs": ("job-message", "job-name", "progress", "chat-key"),
    "approvals": ("approval-argument", "chat-key"),
    "approval": ("approval-argument", "chat-key"),
    "timers": ("timer", "chat-key"),
    "plugins": ("plugin-name", "plugin-description"),
    "plugin": (
        "plugin-name", "plugin-description", "plugin-version", "config-title", "config-hint", "signature",
        "method-doc", "worker-name",
    ),
    "mcp": ("mcp-command", "mcp-argument"),
    "operations": (
        "dead-letter-id", "dead-letter-task", "dead-letter-lane", "dead-letter-reason",
        "worker-name", "worker-host",
    ),
    "keys": ("api-key-name", "api-key-chats"),
}  # fmt: skip


@pytest.fixture(scope="module")
def pages(console: Console) -> dict[str, str]:
    """The addresses of the pages, of a system whose texts are all hostile."""
    text = "\n".join(FORMS.values())
    body = {
        "text": f"{text}\n```python\n{CODE}\n```\n```python\n{LAST}\n```",
        "user_id": "eve",
        "user_name": attack("sender-name"),
    }
    answer = console.http.post(f"chats/{quote(CHAT, safe='')}/messages", params={"wait": 60}, json=body)
    turn = answer.json()["turn_id"]
    assert console.ended(turn)["state"] == "waiting", console.turn(turn)
    (approval,) = console.http.get("approvals", params={"chat_key": CHAT}).json()["items"]
    command = {"command": attack("mcp-command"), "args": [attack("mcp-argument")]}
    declared = console.http.put("mcp/servers/evil", json={"declaration": command})
    assert declared.is_success, declared.text
    key = {"name": attack("api-key-name"), "chats": attack("api-key-chats"), "scopes": ["read"]}
    assert console.http.post("keys", json=key).is_success
    leave_dead_letter(console)
    name_worker(console)
    return {
        "turn": f"#/turns/{turn}",
        "talk": f"#/chats/{quote(CHAT, safe='')}",
        "chats": "#/chats",
        "jobs": "#/jobs?show=all",
        "approvals": "#/approvals",
        "approval": f"#/approvals/{approval['id']}",
        "timers": "#/timers",
        "plugins": "#/plugins",
        "plugin": "#/plugins/Eve.hostile",
        "mcp": "#/mcp",
        "operations": "#/operations",
        "keys": "#/keys",
    }


def leave_dead_letter(console: Console) -> None:
    """Put a message among the dead letters that claims to be a hostile task, and a refused one."""
    broker = console.fleet.settings.broker
    keys = Keys(prefix=broker.key_prefix)
    message = {
        "headers": {"id": attack("dead-letter-id"), "task": attack("dead-letter-task")},
        "properties": {"delivery_info": {"routing_key": attack("dead-letter-lane")}},
    }
    refused = {"reason": attack("dead-letter-reason"), "bytes": 1, "message": "x"}
    with redis.Redis.from_url(str(broker.url)) as client:
        client.lpush(keys.dead, json.dumps(message))
        client.lpush(keys.refused, json.dumps(refused))


def name_worker(console: Console) -> None:
    """List a worker with a hostile name and host beside the others, as a writer in the database can."""
    with console.database() as database:
        database.row_factory = sqlite3.Row
        row = dict(database.execute("SELECT * FROM workers WHERE lane = 'methods'").fetchone())
        hostile = row | {"id": "hostile", "name": attack("worker-name"), "host": attack("worker-host")}
        hostile["lease_until"] = "2999-01-01 00:00:00.000000"
        marks = ", ".join("?" * len(hostile))
        database.execute(
            f"INSERT INTO workers ({', '.join(hostile)}) VALUES ({marks})",
            tuple(hostile.values()),
        )
        database.execute(
            "INSERT INTO worker_plugins (worker_id, position, digest)"
            " SELECT 'hostile', position, digest FROM worker_plugins WHERE worker_id = ?",
            (row["id"],),
        )


#: Elements and attributes that only markup of an attempt could have made.
_INTERPRETED = """
() => {
  const made = [...document.querySelectorAll(
    "#injected, img[src='x'], form[action],"
    + "main :is(script, iframe, object, embed, style, link, meta, base, animate, b)")];
  const armed = [...document.querySelectorAll("*")].filter(one => [...one.attributes].some(
    item => /^on/i.test(item.name) || /^\\s*javascript:/i.test(item.value)));
  return [...made, ...armed].map(one => one.outerHTML.slice(0, 200));
}
"""
#: A click on every text that is not part of a control.
_CLICK = """
() => document.querySelectorAll("main :is(p, span, td, dd, code):not(:is(button, summary, a, label) *)")
  .forEach(one => one.click())
"""
#: All that a page says: texts, fields, titles and labels.
_SAID = """
() => [document.title, document.body.textContent, ...[...document.querySelectorAll("*")].flatMap(
  one => [one.value, one.title, one.alt, one.placeholder, one.getAttribute("aria-label")])].join("\\n")
"""


def unfold(page: Any) -> None:
    """Open everything that is folded, also what opens inside."""
    for _ in range(3):
        page.evaluate("() => document.querySelectorAll('main details').forEach(one => { one.open = true })")
        page.evaluate("() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")


def seen(place: str) -> str:
    """What a page must show of an attempt, to the letter."""
    return SEEN.get(place, f"<b id=injected>{place}</b>")


def wait_for_texts(page: Any, name: str, places: tuple[str, ...]) -> None:
    """Wait until the page shows the attempts: some of it comes with the stream, or is read after the rest."""

    def missing() -> list[str]:
        unfold(page)
        said = page.evaluate(_SAID)
        return [place for place in places if seen(place) not in said]

    wait_until(lambda: not missing(), what=lambda: f"{missing()} on the page {name}")


def test_no_text_of_others_is_interpreted_on_any_page(console: Console, pages: dict[str, str]) -> None:
    attempts = {place for places in SHOWN.values() for place in places}
    assert len(attempts) >= 40
    with console.window() as window:
        for name, places in SHOWN.items():
            wait_for_texts(window.go(pages[name]), name, places)
            assert window.page.evaluate(_INTERPRETED) == [], name
            # A click on every text: handlers that an attribute brought would run now.
            window.page.evaluate(_CLICK)
            window.check()


def test_an_address_of_the_console_is_text_too(console: Console) -> None:
    with console.window() as window:
        page = window.page
        for part in (
            "<img src=x onerror=alert(1)>",
            "javascript:alert(1)",
            "%3Cscript%3Ealert(1)%3C/script%3E",
        ):
            window.go(f"#/{quote(part)}")
            page.get_by_role("heading", name="Not found").wait_for()
            window.go(f"#/turns/{quote(part, safe='')}")
            page.get_by_role("heading", name="Not found").wait_for()
            assert page.evaluate(_INTERPRETED) == []
        page.goto(f"{console.url}/console/#/login?next=javascript:alert(1)")
        page.get_by_label("Key").fill(console.key)
        page.keyboard.press("Enter")
        page.get_by_role("heading", name="Chats").wait_for()
        page.goto(f"{console.url}/console/#/login?next=//evil.example/")
        page.reload()
        page.get_by_label("Key").fill(console.key)
        page.keyboard.press("Enter")
        page.wait_for_function("() => !location.hash.startsWith('#/login')")
        assert page.url.startswith(f"{console.url}/console/")
        window.check()


def test_a_hostile_file_is_never_a_document_of_the_console(console: Console, pages: dict[str, str]) -> None:
    turn = console.turn(pages["turn"].removeprefix("#/turns/"))
    files = [part["file"] for message in turn["messages"] for part in message["parts"] if "file" in part]
    assert len(files) == 3
    with console.window() as window:
        window.go("#/chats")
        for file in files:
            answer: Any = window.page.request.get(f"{console.url}{file['url']}")
            policy = answer.headers["content-security-policy"]
            assert "sandbox" in policy and "allow-scripts" not in policy
            assert answer.headers["x-content-type-options"] == "nosniff"


def test_the_policy_refuses_markup_even_if_a_script_of_the_console_tried(console: Console) -> None:
    with console.window() as window:
        page = window.go("#/chats")
        # As a script of the page, not through the debugger, whose evaluations the policy does not concern.
        refused = page.evaluate(
            "() => { try { document.body.innerHTML = '<p>x</p>' } catch (error) { return error.name } }"
        )
        assert refused == "TypeError"
        assert window.faults == []
