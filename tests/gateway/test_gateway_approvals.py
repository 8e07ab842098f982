"""Approvals over the API, the client and the command line, with a worker that runs what is approved."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import httpx
import pytest
from gateway_server import served
from key_ring import make_key
from nekro_inside import run_inside
from waiting import WAIT_SECONDS, eventually
from worker_fleet import Fleet

from nekro.cli.environment import environment_of
from nekro.gateway.app import create_app
from nekro.operations.actor import Scope
from nekro.operations.turn_states import TurnEnd
from nekro_agent.errors import StorageUnavailableError
from nekro_client import AsyncClient, ConflictError, ForbiddenError, InvalidRequestError
from nekro_client.models import EventType, TurnState
from storage.accounts.approvals import ApprovalRepository
from storage.accounts.keys import AuditRepository
from storage.states import ApprovalState

if TYPE_CHECKING:
    from storage.repositories.events import ChatEvent

TILL = Path(__file__).parent.parent / "rounds" / "approval_plugins"
SCRIPT = """
- when: 'receipt (\\w+)'
  answer: |
    ```python
    send_msg_text(_ck, "told of ${1}")
    ```
- when: 'denied it'
  answer: As you wish.
- when: 'please pay (\\w+)'
  answer: |
    ```python
    pay("${1}")
    ```
- when: '.*'
  answer: ''
"""
PAY = {"method": "tests.till.pay", "chat_key": "web-1", "args": ["ada"], "user_id": "u1"}


@pytest.fixture(scope="module")
def database_url(sqlite_url: str) -> str:
    """One database suffices here: rounds, whose tests run on each, decide on the same rows."""
    return sqlite_url


@pytest.fixture(scope="module")
def till(make_fleet: Callable[..., Fleet], tmp_path_factory: pytest.TempPathFactory) -> Fleet:
    """A fleet with workers, and methods that require approval."""
    script = tmp_path_factory.mktemp("model") / "script.yaml"
    script.write_text(SCRIPT)
    fleet = make_fleet(
        plugins={"dirs": (TILL,)}, approval={"approvers": ("key:*:chief",)}, llm={"script": script}
    )
    fleet.start("methods", "rounds")
    return fleet


@pytest.fixture(scope="module")
def keys(till: Fleet) -> dict[str, str]:
    """Keys by what their holders do."""
    return {
        "caller": make_key(till.settings, Scope.CALL, Scope.READ),
        "decider": make_key(till.settings, Scope.APPROVE, Scope.READ),
        "coder": make_key(till.settings, Scope.RUN, Scope.POST, Scope.READ),
        "both": make_key(till.settings, Scope.CALL, Scope.APPROVE),
        "site": make_key(till.settings, Scope.POST, Scope.READ),
        "elsewhere": make_key(till.settings, Scope.APPROVE, Scope.READ, chats="other-*"),
    }


@pytest.fixture
async def clients(till: Fleet, keys: dict[str, str]) -> AsyncIterator[dict[str, AsyncClient]]:
    """A client of a gateway for each key."""
    async with served(create_app(till.settings)) as plain:
        made = {name: AsyncClient(str(plain.base_url), key) for name, key in keys.items()}
        yield made
        for client in made.values():
            await client.close()


def paid(fleet: Fleet) -> list[str]:
    path = fleet.settings.data_dir / "plugins" / "tests.till" / "journal.txt"
    return path.read_text().splitlines() if path.exists() else []


async def ended(client: AsyncClient, approval_id: str) -> Any:
    async def done() -> Any:
        found = await client.approvals.get(approval_id)
        return found if found.call_state in ("done", "failed", "unknown") else None

    return await eventually(done, what=f"the call of {approval_id} to end")


async def ask(client: AsyncClient, *args: Any, chat_key: str = "web-1") -> str:
    call = await client.call("tests.till.pay", args, chat_key=chat_key, user_id="u1")
    assert (call.state, call.approval_id is None) == ("awaiting", False)
    return str(call.approval_id)


async def test_a_call_without_the_right_waits_and_runs_as_it_was_approved(
    till: Fleet, clients: dict[str, AsyncClient]
) -> None:
    asked = await ask(clients["caller"], "ann", 7)
    found = await clients["caller"].approvals.get(asked)
    assert (found.state, found.call_state, found.user_id) == ("pending", "awaiting", "u1")
    assert found.call == "tests.till.pay(\n    'ann',\n    7,\n)"
    assert found.arguments == {"args": ["ann", 7], "kwargs": {}}
    for name, error in (("caller", ForbiddenError), ("elsewhere", Exception)):
        with pytest.raises(error):
            await clients[name].approvals.approve(asked)
    approved = await clients["decider"].approvals.approve(asked, args=["ann", 8], reason="rounded up")
    assert (approved.state, approved.is_edited, approved.reason) == ("approved", True, "rounded up")
    assert approved.difference is not None and "+    8," in approved.difference
    assert approved.decided_by is not None and approved.decided_by.startswith("key:")
    assert (await ended(clients["decider"], asked)).call_state == "done"
    assert "paid ann 8" in paid(till) and "paid ann 7" not in paid(till)
    page = await clients["decider"].chat("web-1").messages()
    assert any("receipt ann 8" in message.text for message in page.items)
    with pytest.raises(ConflictError, match=f"is approved by {approved.decided_by}"):
        await clients["decider"].approvals.deny(asked)


async def test_a_key_with_the_right_approves_its_own_calls(
    till: Fleet, clients: dict[str, AsyncClient]
) -> None:
    call = await clients["both"].call("tests.till.pay", ["own"], chat_key="web-2", user_id="u1")
    assert (call.state, call.value) == ("done", "receipt own 1")
    (row,) = (await clients["decider"].approvals.list(chat_key="web-2")).items
    assert (row.state, row.call_id, row.call) == ("approved", call.id, None)
    assert row.summary == "tests.till.pay('own')", "a list says what would run"
    assert row.decided_by is not None and row.decided_by.startswith("key:")


async def test_an_approval_for_a_chat_is_revoked_together_with_its_record(
    till: Fleet, clients: dict[str, AsyncClient], keys: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = await ask(clients["caller"], "once", chat_key="web-9")
    await clients["decider"].approvals.approve(asked, scope="chat")
    await ended(clients["decider"], asked)

    async def found() -> tuple[int, int]:
        services = till.services()
        async with services.database.read() as transaction:
            grants = await transaction.approvals.grants("web-9", "tests.till.pay", turn_id=None)
            acts = await transaction.audit.newest(limit=10, action="approval.revoke", subject=asked)
        await services.close()
        return len(grants), len(acts)

    async def fail(*_: Any, **__: Any) -> None:
        raise StorageUnavailableError("the connection was lost")

    headers = {"Authorization": f"Bearer {keys['decider']}"}
    async with served(create_app(till.settings)) as gateway:
        for part, name in ((ApprovalRepository, "revoke"), (AuditRepository, "add")):
            with monkeypatch.context() as patched:
                patched.setattr(part, name, fail)
                failed = await gateway.post(f"/api/v1/approvals/{asked}/revoke", headers=headers)
            assert failed.status_code == 503
            assert await found() == (1, 0)
    await clients["decider"].approvals.revoke(asked)
    assert await found() == (0, 1)


async def test_requests_are_listed_by_pages_and_denied(clients: dict[str, AsyncClient]) -> None:
    made = [await ask(clients["caller"], f"p{number}", chat_key="web-3") for number in range(3)]
    seen, cursor = [], None
    while True:
        page = await clients["decider"].approvals.list(
            chat_key="web-3", state="pending", cursor=cursor, limit=2
        )
        seen += [item.id for item in page.items]
        cursor = page.next_cursor
        if cursor is None:
            break
    assert seen == made[::-1]
    denied = await clients["decider"].approvals.deny(made[0], reason="no")
    assert (denied.state, denied.call_state) == ("denied", "failed")
    assert denied.call_error is not None and denied.call_error.code == "NotApprovedError"


async def test_of_two_concurrent_decisions_the_second_gets_the_first(
    clients: dict[str, AsyncClient],
) -> None:
    asked = await ask(clients["caller"], "both", chat_key="web-7")
    outcomes = await asyncio.gather(
        clients["decider"].approvals.approve(asked),
        clients["both"].approvals.deny(asked, reason="no"),
        return_exceptions=True,
    )
    (refused,) = [one for one in outcomes if isinstance(one, ConflictError)]
    (kept,) = [one for one in outcomes if not isinstance(one, BaseException)]
    assert (refused.status, refused.code) == (409, "already_decided")
    assert f"is {kept.state} by {kept.decided_by}" in str(refused)


async def test_people_whom_a_key_vouches_for_decide_in_the_chat(clients: dict[str, AsyncClient]) -> None:
    asked = await ask(clients["caller"], "chat", chat_key="web-4")
    site = clients["site"].chat("web-4")
    number = (await clients["site"].approvals.get(asked)).number
    notice = (await site.messages()).items[-1].text
    assert notice == (
        f"tests.till.pay waits for approval {number}; it has not run yet.\ntests.till.pay('chat')\n"
        f"Answer /approve {number} or /deny {number} REASON."
    )
    for user, state in (("someone", "pending"), ("chief", "denied")):
        posted = await site.send(f"/deny {number} not now", user_id=user)
        assert posted.turn_id is None, "a decision is not a message to the agent"
        assert (await clients["site"].approvals.get(asked)).state == state
    decided = await clients["site"].approvals.get(asked)
    assert decided.decided_by is not None and decided.decided_by.startswith("chat:key:")
    texts = [message.text for message in (await site.messages()).items]
    assert "You may not decide on calls of this chat." in texts
    assert f"Denied: tests.till.pay('chat') does not run ({number})." in texts


async def test_the_answer_of_a_call_that_waits_is_202_and_its_repetition_asks_once(
    till: Fleet, keys: dict[str, str]
) -> None:
    async with served(create_app(till.settings)) as client:
        headers = {"Authorization": f"Bearer {keys['caller']}", "Idempotency-Key": "one"}
        answers = [await client.post("/api/v1/calls", json=PAY, headers=headers) for _ in range(2)]
        assert [answer.status_code for answer in answers] == [202, 202]
        assert answers[0].json()["approval_id"] == answers[1].json()["approval_id"]
        wrong = {"decision": "deny", "args": []}
        path = f"/api/v1/approvals/{answers[0].json()['approval_id']}/decision"
        refused = await decide(client, path, wrong, keys["decider"])
        assert (refused.status_code, refused.json()["code"]) == (422, "invalid_value")
        misfit = await decide(client, path, {"decision": "approve", "kwargs": {"whom": 1}}, keys["decider"])
        assert (misfit.status_code, misfit.json()["code"]) == (422, "argument")


@pytest.mark.extended
async def test_code_ends_at_a_call_that_waits_and_its_report_names_the_approval(
    till: Fleet, clients: dict[str, AsyncClient]
) -> None:
    code = 'for name in ("fay", "gus"):\n    print(name, flush=True)\n    print(pay(name))'
    coder, decider = clients["coder"], clients["decider"]
    ran = await coder.run(code, chat_key="web-5", user_id="u1", idempotency_key="fay")
    assert (ran.stop_type, ran.exit_code, ran.output, ran.error) == ("APPROVAL", 14, "fay\n", None)
    (call,) = ran.calls
    assert (call.method, call.state, call.worker) == ("tests.till.pay", "awaiting", None)
    again = await coder.run(code, chat_key="web-5", user_id="u1", idempotency_key="fay")
    assert again == ran, "a repetition makes no second request"
    (row,) = (await decider.approvals.list(chat_key="web-5")).items
    assert (row.id, row.call_id, row.user_id) == (call.approval_id, call.id, "u1")
    with pytest.raises(InvalidRequestError, match="belongs to no turn"):
        await decider.approvals.approve(row.id, scope="turn")

    await decider.approvals.approve(row.id, scope="chat")
    assert (await ended(decider, row.id)).call_state == "done"
    texts = [message.text for message in (await coder.chat("web-5").messages()).items]
    assert any("receipt fay 1" in text for text in texts) and not any("told of" in text for text in texts)
    passed = await coder.run(code.replace("fay", "ida"), chat_key="web-5")
    assert (passed.stop_type, passed.output) == ("NORMAL", "ida\nreceipt ida 1\ngus\nreceipt gus 1\n")
    assert [paid(till).count(f"paid {name} 1") for name in ("fay", "gus", "ida")] == [1, 1, 1]


@pytest.mark.extended
async def test_streamed_code_that_waits_wakes_the_agent_if_it_was_asked_to(
    till: Fleet, clients: dict[str, AsyncClient]
) -> None:
    coder, decider = clients["coder"], clients["decider"]
    async with coder.stream_run('print("a")\npay("hal")', chat_key="web-6", follow_up=True) as pieces:
        assert "".join([piece async for piece in pieces]) == "a\n"
        ran = await pieces.result()
    assert ran.stop_type == "APPROVAL" and ran.follow_ups == []
    (row,) = (await decider.approvals.list(chat_key="web-6", state="pending")).items
    assert row.id == ran.calls[0].approval_id
    await decider.approvals.approve(row.id)

    async def told() -> bool:
        return any(m.text == "told of hal" for m in (await coder.chat("web-6").messages()).items)

    await eventually(told, what="the round that the result requests")
    assert paid(till).count("paid hal 1") == 1


async def asked_by_the_agent(clients: dict[str, AsyncClient], who: str, *, chat_key: str) -> tuple[Any, Any]:
    """Let the agent call a method that requires approval; returns the turn and the request."""
    chat = clients["coder"].chat(chat_key)
    turn = (await chat.send(f"please pay {who}", user_id="u1", wait=WAIT_SECONDS)).turn
    (row,) = (await clients["decider"].approvals.list(chat_key=chat_key, state="pending")).items
    return turn, row


async def test_a_turn_waits_for_a_person_until_the_decision(
    till: Fleet, clients: dict[str, AsyncClient], keys: dict[str, str]
) -> None:
    coder, chat = clients["coder"], clients["coder"].chat("web-10")
    turn, row = await asked_by_the_agent(clients, "kim", chat_key="web-10")
    assert (turn.state, turn.waits_for, turn.error) == (TurnState.WAITING, [row.id], None)
    assert turn.rounds[-1].stop_type == "APPROVAL"
    assert (await coder.turns.wait(turn.id, timeout_seconds=WAIT_SECONDS)).waits_for == [row.id]
    for state, ids in (("waiting", [turn.id]), ("done", []), ("running", [])):
        listed = (await chat.turns(state=TurnState(state))).items
        assert [(item.id, item.state, item.waits_for) for item in listed] == [
            (one, state, [row.id]) for one in ids
        ]
    async with served(create_app(till.settings)) as plain:
        headers = {"Authorization": f"Bearer {keys['coder']}", "User-Agent": "nekro-client"}
        former = await plain.get(f"/api/v1/turns/{turn.id}", headers=headers)
    assert former.json()["state"] == "done", "the client of release 0.2 would wait for ever"

    await clients["decider"].approvals.approve(row.id)
    after = await coder.turns.get(turn.id)
    assert (after.state, after.waits_for, after.finished_at) == (TurnState.DONE, [], turn.finished_at)
    async with chat.events(after=0) as events:
        ends = [event async for event in _until_ends(events, 2)]
    assert [(event.turn_id == turn.id, event.data) for event in ends] == [
        (True, {"state": "waiting", "waits_for": [row.id]}),
        (False, {"state": "done"}),
    ]
    assert (await coder.turns.get(turn.id)).following == [ends[1].turn_id]


async def _until_ends(events: Any, count: int) -> AsyncIterator[Any]:
    async for event in events:
        if event.type == EventType.TURN_ENDED:
            yield event
            count -= 1
        if not count:
            return


async def test_a_turn_whose_call_is_denied_is_done_and_one_that_is_withdrawn_is_cancelled(
    clients: dict[str, AsyncClient],
) -> None:
    turn, row = await asked_by_the_agent(clients, "lea", chat_key="web-11")
    await clients["decider"].approvals.deny(row.id)
    assert (await clients["coder"].turns.get(turn.id)).state == TurnState.DONE
    turn, row = await asked_by_the_agent(clients, "max", chat_key="web-12")
    cancelled = await clients["coder"].turns.cancel(turn.id)
    assert (cancelled.state, cancelled.waits_for) == (TurnState.CANCELLED, [])
    listed = (await clients["coder"].chat("web-12").turns(state=TurnState.CANCELLED)).items
    assert [item.id for item in listed] == [turn.id]
    assert (await clients["coder"].approvals.get(row.id)).state == "cancelled"


async def test_a_completion_of_a_turn_that_waits_says_so(till: Fleet, keys: dict[str, str]) -> None:
    body = {"model": "nekro", "messages": [{"role": "user", "content": "please pay ned"}]}
    headers = {"Authorization": f"Bearer {keys['coder']}", "X-Nekro-Chat": "web-13"}
    async with served(create_app(till.settings)) as plain:
        answer = await plain.post("/v1/chat/completions", json=body, headers=headers)
        asked = {"model": "nekro", "input": "please pay pam"}
        response = await plain.post("/v1/responses", json=asked, headers=headers)
    assert (response.json()["status"], response.json()["error"]) == ("completed", None)
    (choice,) = answer.json()["choices"]
    assert choice["finish_reason"] == "stop"
    assert re.search(
        r"^tests.till.pay waits for approval \d+; it has not run yet\.", choice["message"]["content"]
    )


@pytest.mark.parametrize(
    ("states", "state", "waits_for"),
    [
        (["pending", "approved"], "waiting", ["0"]),
        (["approved"], "done", []),
        (["denied"], "done", []),
        (["expired"], "done", []),
        (["cancelled"], "cancelled", []),
        ([], "done", []),
    ],
)
def test_the_state_of_a_turn_that_ended_as_waiting_follows_its_requests(
    states: list[str], state: str, waits_for: list[str]
) -> None:
    """Without rows, because retention has deleted them, nothing is waited for."""
    end = cast("ChatEvent", SimpleNamespace(data={"state": "waiting", "waits_for": ["0", "1"]}))
    rows = {str(number): ApprovalState(one) for number, one in enumerate(states)}
    found = TurnEnd([], [], end, rows)
    assert (found.state, found.waits_for, found.error) == (state, waits_for, None)


async def decide(client: httpx.AsyncClient, path: str, body: dict[str, Any], key: str) -> httpx.Response:
    return await client.post(path, json=body, headers={"Authorization": f"Bearer {key}"})


@pytest.mark.extended
def test_the_shell_shows_approves_denies_and_calls(till: Fleet, tmp_path: Path) -> None:
    def nekro(*arguments: str) -> tuple[int, str, str]:
        return run_inside(*arguments, directory=tmp_path, environment=environment_of(till.settings))

    code, _, err = nekro("call", "pay", "--args", '["shell"]', "--chat-key", "cli-1")
    assert code == 2 and "tests.till.pay('shell')" in err and "--yes" in err
    code, out, _ = nekro("call", "pay", "--args", '["shell"]', "--chat-key", "cli-1", "--yes")
    assert (code, out) == (0, "receipt shell 1\n")
    code, out, _ = nekro("approvals", "list", "--all", "--chat-key", "cli-1", "--json")
    (row,) = json.loads(out)
    assert code == 0 and row["state"] == "approved" and row["decided_by"].startswith("shell:")
    code, out, _ = nekro("approvals", "list", "--all", "--chat-key", "cli-1")
    assert code == 0 and re.search(
        rf"^{row['number']} +cli-1 +approved +tests.till.pay\('shell'\) ", out, re.M
    )
    code, out, _ = nekro("approvals", "show", str(row["number"]))
    assert code == 0 and f"id            {row['id']}\n" in out
    code, out, _ = nekro("approvals", "show", row["id"][:12])
    assert code == 0 and "tests.till.pay('shell')" in out and row["digest"] in out
    code, _, err = nekro("approvals", "deny", row["id"])
    assert code == 4 and f"is approved by {row['decided_by']}" in err
    code, _, err = nekro("approvals", "approve", "none", "--yes")
    assert code == 4 and "no approval has the id none" in err
    (tmp_path / "work.py").write_text('pay("exec")')
    code, out, err = nekro("exec", "work.py", "--chat-key", "cli-2", "--no-follow-up")
    (row,) = json.loads(nekro("approvals", "list", "--chat-key", "cli-2", "--json")[1])
    assert code == 14 and f"waits for approval {row['id']}" in err
    code, _, err = nekro("approvals", "show")
    assert code == 2


async def test_an_edited_list_of_alike_items_is_shown(clients: dict[str, AsyncClient]) -> None:
    """The comparison of such lists took a minute, in which the gateway answered nobody."""
    items = [number % 100 for number in range(20_000)]
    asked = await ask(clients["caller"], "ann", items)
    await clients["decider"].approvals.approve(asked, args=["bob", sorted(items)])
    found = await clients["decider"].approvals.get(asked)
    assert found.difference is not None
    assert "-    'ann',\n+    'bob',\n" in found.difference
