"""Approvals over the API, the client and the command line, with a worker that runs what is approved."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from gateway_server import served
from key_ring import make_key
from nekro_inside import run_inside
from waiting import eventually
from worker_fleet import Fleet

from cli.environment import environment_of
from gateway.app import create_app
from gateway.identity import Scope
from nekro_client import AsyncClient, ConflictError, ForbiddenError

TILL = Path(__file__).parent.parent / "rounds" / "approval_plugins"
PAY = {"method": "tests.till.pay", "chat_key": "web-1", "args": ["ada"], "user_id": "u1"}


@pytest.fixture(scope="module")
def database_url(tmp_path_factory: pytest.TempPathFactory) -> str:
    """One database suffices here: rounds, whose tests run on each, decide on the same rows."""
    return f"sqlite:///{tmp_path_factory.mktemp('db') / 'nekro.db'}"


@pytest.fixture(scope="module")
def till(make_fleet: Callable[..., Fleet]) -> Fleet:
    """A fleet with a worker, and methods that require approval."""
    fleet = make_fleet(plugins={"dirs": (TILL,)}, approval={"approvers": ("key:*:chief",)})
    fleet.start("methods")
    return fleet


@pytest.fixture(scope="module")
def keys(till: Fleet) -> dict[str, str]:
    """Keys by what their holders do."""
    return {
        "caller": make_key(till.settings, Scope.CALL, Scope.READ),
        "decider": make_key(till.settings, Scope.APPROVE, Scope.READ),
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
    assert row.decided_by is not None and row.decided_by.startswith("key:")


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


async def test_people_whom_a_key_vouches_for_decide_in_the_chat(clients: dict[str, AsyncClient]) -> None:
    asked = await ask(clients["caller"], "chat", chat_key="web-4")
    site = clients["site"].chat("web-4")
    for user, state in (("someone", "pending"), ("chief", "denied")):
        posted = await site.send(f"/deny {asked} not now", user_id=user)
        assert posted.turn_id is None, "a decision is no message to the agent"
        assert (await clients["site"].approvals.get(asked)).state == state
    decided = await clients["site"].approvals.get(asked)
    assert decided.decided_by is not None and decided.decided_by.startswith("chat:key:")
    texts = [message.text for message in (await site.messages()).items]
    assert "You may not decide on calls of this chat." in texts
    assert f"Denied: tests.till.pay does not run ({asked})." in texts


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


async def decide(client: httpx.AsyncClient, path: str, body: dict[str, Any], key: str) -> httpx.Response:
    return await client.post(path, json=body, headers={"Authorization": f"Bearer {key}"})


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
    code, out, _ = nekro("approvals", "show", row["id"][:12])
    assert code == 0 and "tests.till.pay('shell')" in out and row["digest"] in out
    code, _, err = nekro("approvals", "deny", row["id"])
    assert code == 4 and f"is approved by {row['decided_by']}" in err
    code, _, err = nekro("approvals", "approve", "none", "--yes")
    assert code == 4 and "no approval has the id none" in err
    code, _, err = nekro("approvals", "show")
    assert code == 2
