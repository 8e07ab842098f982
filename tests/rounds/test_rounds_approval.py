"""Calls that wait for approval: requested, decided, run once; and what does not count as a decision."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from round_bench import Bench, Model, states
from sqlalchemy import Table, update
from waiting import WAIT_SECONDS

from broker_config.settings import ApprovalSettings
from nekro.app import use_cases
from nekro.app.approvals.requests import ApprovalRequests
from nekro.app.approvals.shown import difference
from nekro.broker.delivery.messages import CallMessage
from nekro.sandbox.models import StopType
from nekro.wire.invocation import Invocation
from nekro.wire.values import encode_arguments
from nekro_agent.errors import (
    AlreadyDecidedError,
    ArgumentError,
    MessageRefusedError,
    NotApprovedError,
    OutcomeUnknownError,
    StorageUnavailableError,
)
from nekro_agent.ports import IncomingMessage
from nekro_agent.shared_clock import shared_time
from nekro_client.event_types import EventType
from nekro_client.models import TurnState
from storage.accounts.approvals import Approval
from storage.repositories.calls import Call
from storage.states import ApprovalScope, ApprovalState, CallState, TriggerKind
from storage.tables import APPROVALS, CALLS
from storage.transaction import Transaction
from workers.ops.sweeps import ApprovalSweep
from workers.rounds import attempt_events as round_events

HERE = Path(__file__).parent
SAY = 'send_msg_text(_ck, "done")'
PAY = 'print("before")\npay("ada", amount=3)\nprint("not reached")'
LOOP = 'for name in ("ada", "bob", "eve"):\n    print(pay(name))'
OpenBench = Callable[..., Awaitable[Bench]]


@pytest.fixture
async def till(kind: str, open_bench: OpenBench) -> Bench:
    """A bench with methods that require approval."""
    return await open_till(open_bench, kind)


async def open_till(open_bench: OpenBench, kind: str, **approval: Any) -> Bench:
    settings = {"approvers": ("sse:chief",), "resume": "model", **approval}
    plugins = {"dirs": (HERE / "plugins", HERE / "approval_plugins")}
    return await open_bench(kind, plugins=plugins, approval=settings)


def paid(bench: Bench) -> list[str]:
    """The payments."""
    path = bench.settings.data_dir / "plugins" / "tests.till" / "journal.txt"
    return path.read_text().splitlines() if path.exists() else []


async def asked(bench: Bench, code: str = PAY, *, chat_key: str = "chat") -> Approval:
    """Let the model call a method that requires approval; returns the request."""
    await bench.say(chat_key, "hello")
    await bench.play(chat_key, bench.drain(Model(code)))
    return await pending(bench, chat_key)


async def pending(bench: Bench, chat_key: str = "chat") -> Approval:
    (row,) = await approvals(bench, chat_key, state=ApprovalState.PENDING)
    return row


async def approvals(
    bench: Bench, chat_key: str = "chat", *, state: ApprovalState | None = None
) -> list[Approval]:
    async with bench.database.read() as tx:
        return await tx.approvals.newest(limit=100, chat_key=chat_key, state=state)


async def call_of(bench: Bench, row: Approval) -> Call:
    async with bench.database.read() as tx:
        return await tx.calls.get(row.call_id)


async def message_of(bench: Bench, row: Approval) -> CallMessage:
    """The message that waits for a worker."""
    call = await call_of(bench, row)
    return CallMessage.from_row(call.invocation or {}, signer=bench.services.signer)


async def turn_ends(bench: Bench, chat_key: str = "chat") -> list[tuple[str | None, dict[str, Any]]]:
    """The events with which turns ended: the turn, and how it stood."""
    async with bench.database.read() as tx:
        found = await tx.events.after(chat_key, number=0, limit=200)
    return [(event.turn_id, event.data) for event in found if event.type == EventType.TURN_ENDED]


async def deliver(bench: Bench, message: CallMessage) -> dict[str, Any]:
    """Give a message to a worker."""
    return await bench.services.call_handler.handle(
        message.body, task_name=message.invocation.method, find=bench.services.methods.find
    )


async def approve_and_run(bench: Bench, row: Approval, **options: Any) -> None:
    await bench.services.approval_decisions.approve(row.id, by="shell:root", **options)
    await deliver(bench, await message_of(bench, row))


def signed(bench: Bench, invocation: Invocation) -> CallMessage:
    return CallMessage.of(invocation, signer=bench.services.signer, lane="methods", reply_to=None)


async def events(bench: Bench, chat_key: str = "chat") -> list[tuple[str, dict[str, Any]]]:
    async with bench.database.read() as tx:
        found = await tx.events.after(chat_key, number=0, limit=200)
    return [(event.type, event.data) for event in found if event.type.startswith("approval.")]


@pytest.mark.extended
async def test_a_call_waits_and_runs_once_when_it_is_approved(till: Bench) -> None:
    row = await asked(till)
    (round_,) = await till.rounds("chat")
    assert (round_.stop_type, round_.output, states([round_])) == (StopType.APPROVAL, "before\n", ["done"])
    assert (row.method, row.turn_id, row.user_id) == ("tests.till.pay", round_.turn_id, "u1")
    assert (await call_of(till, row)).state is CallState.AWAITING and paid(till) == []
    notice = (await till.messages("chat"))[-1].text
    assert f"approval {row.number};" in notice and "tests.till.pay(\n    'ada',\n    amount=3,\n)" in notice

    await approve_and_run(till, row)
    await deliver(till, await message_of(till, row))
    assert paid(till) == ["paid ada 3"]
    call = await call_of(till, row)
    assert (call.state, call.fence) == (CallState.DONE, 1)
    model = Model(SAY)
    rounds = await till.play("chat", till.drain(model))
    assert [(item.trigger_kind, item.number) for item in rounds] == [
        (TriggerKind.MESSAGE, 1),
        (TriggerKind.CALL, 1),
    ]
    (prompt,) = model.prompts
    assert "a person must approve" in prompt and 'print("not reached")' in prompt, "it sees its program"
    assert prompt.count("receipt ada 3") == 1
    assert [name for name, _ in await events(till)] == ["approval.requested", "approval.decided"]
    (_, requested), (_, decided) = await events(till)
    assert (requested["approval_id"], decided["state"]) == (row.id, "approved")
    assert decided["decided_by"] == "shell:root"


async def test_a_request_follows_the_call_that_waits_for_it(
    till: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests are written at once, calls in batches."""
    monkeypatch.setattr(round_events, "FLUSH_SECONDS", 60.0)
    monkeypatch.setattr(round_events, "_PAUSE_SECONDS", 60.0)
    row = await asked(till)
    async with till.database.read() as tx:
        found = await tx.events.after("chat", number=0, limit=200)
    of_call = [event.type for event in found if event.call_id == row.call_id]
    assert of_call[0] == "call.started" and "approval.requested" in of_call[1:]


@pytest.mark.extended
@pytest.mark.parametrize("kind", ["sqlite"])
async def test_a_denied_call_does_not_run_and_the_next_prompt_says_so(till: Bench) -> None:
    row = await asked(till)
    denied = await till.services.approval_decisions.deny(row.id, by="shell:root", reason="too much")
    assert (denied.state, denied.reason) == (ApprovalState.DENIED, "too much")
    model = Model(SAY)
    await till.play("chat", till.drain(model))
    assert f"pay did not run: approval {row.id}: shell:root denied it: too much" in model.prompts[0]
    assert (await call_of(till, row)).state is CallState.FAILED
    assert paid(till) == []


async def test_of_two_decisions_at_once_one_holds_and_the_other_names_it(till: Bench) -> None:
    row = await asked(till)
    decisions = till.services.approval_decisions
    outcomes = await asyncio.gather(
        decisions.approve(row.id, by="shell:ada"),
        decisions.deny(row.id, by="key:1", reason="no"),
        decisions.approve(row.id, by="shell:bob", scope=ApprovalScope.CHAT),
        return_exceptions=True,
    )
    errors = [outcome for outcome in outcomes if isinstance(outcome, AlreadyDecidedError)]
    (kept,) = [outcome for outcome in outcomes if isinstance(outcome, Approval)]
    assert len(errors) == 2
    assert all(f"{kept.state.value} by {kept.decided_by}" in str(error) for error in errors)
    call = await call_of(till, row)
    assert call.state is (CallState.QUEUED if kept.state is ApprovalState.APPROVED else CallState.FAILED)
    with pytest.raises(AlreadyDecidedError):
        await decisions.deny(row.id, by="shell:eve")


@pytest.mark.parametrize("kind", ["sqlite"])
async def test_a_decision_whose_confirmation_was_lost_is_known_and_made_once(
    till: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = await asked(till)
    begin, lost = till.database.begin, []

    @asynccontextmanager
    async def lose_the_first_answer() -> AsyncIterator[Transaction]:
        async with begin() as transaction:
            yield transaction
        if not lost:
            lost.append(True)
            raise StorageUnavailableError("the connection broke after the commit")

    monkeypatch.setattr(till.database, "begin", lose_the_first_answer)
    decided = await till.services.approval_decisions.approve(row.id, by="shell:root")
    assert lost and (decided.state, decided.decided_by) == (ApprovalState.APPROVED, "shell:root")
    assert [name for name, _ in await events(till)] == ["approval.requested", "approval.decided"]
    await deliver(till, await message_of(till, row))
    assert paid(till) == ["paid ada 3"]


@pytest.mark.extended
async def test_the_first_call_of_a_loop_ends_the_run_and_approval_for_the_turn_lets_the_rest_pass(
    till: Bench,
) -> None:
    row = await asked(till, LOOP)
    await approve_and_run(till, row, scope=ApprovalScope.TURN)
    assert paid(till) == ["paid ada 1"]
    rest = 'for name in ("bob", "eve"):\n    print(pay(name))'
    rounds = await till.play("chat", till.drain(Model(rest)))
    assert paid(till) == ["paid ada 1", "paid bob 1", "paid eve 1"]
    assert rounds[-1].output == "receipt bob 1\nreceipt eve 1\n"
    assert len(await approvals(till)) == 1

    await till.say("chat", "again")
    await till.play("chat", till.drain(Model(LOOP)))
    again = await pending(till)
    assert again.turn_id == again.root_turn_id != row.turn_id, "another turn needs another approval"


@pytest.mark.extended
@pytest.mark.parametrize("kind", ["sqlite"])
async def test_approval_for_the_turn_holds_through_further_approvals_of_the_same_work(till: Bench) -> None:
    first = await asked(till, 'pay("ada")')
    await approve_and_run(till, first, scope=ApprovalScope.TURN)
    await till.play("chat", till.drain(Model('announce("one paid")')))
    second = await pending(till)
    assert (second.method, second.root_turn_id) == ("tests.till.announce", first.turn_id)
    await approve_and_run(till, second)
    model = Model('print(pay("bob"))')
    rounds = await till.play("chat", till.drain(model))
    assert paid(till) == ["paid ada 1", "announced one paid", "paid bob 1"]
    assert rounds[-1].output == "receipt bob 1\n"
    assert "announced one paid" in model.prompts[0] and "receipt ada 1" in model.prompts[0]


@pytest.mark.parametrize("kind", ["sqlite"])
async def test_approval_for_the_chat_holds_in_later_turns_until_it_is_revoked_or_over(
    till: Bench, open_bench: OpenBench
) -> None:
    row = await asked(till)
    await approve_and_run(till, row, scope=ApprovalScope.CHAT)
    await till.play("chat", till.drain(Model(SAY)))
    await till.say("chat", "more")
    await till.play("chat", till.drain(Model('pay("bob")')))
    assert paid(till) == ["paid ada 3", "paid bob 1"]
    await till.say("other", "more")
    await till.play("other", till.drain(Model('pay("eve")')))
    assert (await pending(till, "other")).state is ApprovalState.PENDING, "another chat has no such approval"
    async with till.services.database.begin() as transaction:
        assert await transaction.approvals.revoke("chat", approval_id=row.id) == 1
    await till.say("chat", "more")
    await till.play("chat", till.drain(Model('pay("dan")')))
    await pending(till)
    assert paid(till) == ["paid ada 3", "paid bob 1"]


async def test_an_edited_call_runs_as_edited_and_the_edit_fits_the_method(till: Bench) -> None:
    row = await asked(till)
    decisions = till.services.approval_decisions
    with pytest.raises(ArgumentError, match="missing a required argument: 'who'"):
        await decisions.approve(row.id, by="shell:root", arguments=((), {"whom": "bob"}))
    assert (await pending(till)).digest == row.digest
    await approve_and_run(till, row, arguments=(("bob",), {"amount": 1}))
    assert paid(till) == ["paid bob 1"]
    (edited,) = await approvals(till)
    assert edited.digest != row.digest and edited.arguments == row.arguments
    assert "-    'ada'," in difference(edited) and "+    'bob'," in difference(edited)


@pytest.mark.extended
async def test_a_request_expires_and_then_no_decision_counts(kind: str, open_bench: OpenBench) -> None:
    bench = await open_till(open_bench, kind, pending_seconds=0.001)
    row = (await asked_soon(bench))[0]
    with pytest.raises(AlreadyDecidedError, match="expired"):
        await bench.services.approval_decisions.approve(row.id, by="shell:root")
    sweep = ApprovalSweep(bench.database, bench.services.approval_decisions)
    assert await sweep.sweep() is None
    (expired,) = await approvals(bench)
    assert (expired.state, expired.decided_by) == (ApprovalState.EXPIRED, None)
    model = Model(SAY)
    rounds = await bench.play("chat", bench.drain(model))
    assert f"pay did not run: approval {row.id}: no decision in time" in model.prompts[0]
    assert rounds[-1].number == 2, "expiry does not begin new work"
    assert (await call_of(bench, row)).state is CallState.FAILED and paid(bench) == []


async def asked_soon(bench: Bench) -> list[Approval]:
    await bench.say("chat", "hello")
    await bench.play("chat", bench.drain(Model(PAY)))
    return await approvals(bench)


async def test_messages_and_rows_that_were_changed_after_the_approval_are_refused(till: Bench) -> None:
    row = await asked(till)
    waiting = await message_of(till, row)
    with pytest.raises(NotApprovedError, match="pending"):
        await deliver(till, waiting)
    assert (await call_of(till, row)).state is CallState.AWAITING, "an early message changes nothing"

    await till.services.approval_decisions.approve(row.id, by="shell:root")
    approved = await message_of(till, row)
    other = encode_arguments(("eve",), {"amount": 1000})
    forged = {**approved.body, "invocation": {**approved.body["invocation"], "args": other}}
    with pytest.raises(MessageRefusedError):
        await till.services.call_handler.handle(
            forged, task_name="tests.till.pay", find=till.services.methods.find
        )
    waited = approved.invocation.model_copy(update={"waits_until": None})
    with pytest.raises(NotApprovedError, match="is not what approval"):
        await deliver(till, signed(till, waited.model_copy(update={"args": other})))
    with pytest.raises(NotApprovedError, match="has none"):
        await deliver(till, signed(till, waited.model_copy(update={"call_id": "another"})))

    for column, value in (
        ("digest", "0" * 64),
        ("scope", "chat"),
        ("decided_by", "shell:eve"),
        ("seal", None),
    ):
        kept = (await approvals(till))[0]
        await change_row(till, **{column: value})
        with pytest.raises(NotApprovedError, match="is not what approval"):
            await deliver(till, signed(till, waited))
        await change_row(till, **{column: getattr(kept, column)})
    await deliver(till, signed(till, waited))
    assert paid(till) == ["paid ada 3"]


@pytest.mark.extended
@pytest.mark.parametrize("kind", ["sqlite"])
async def test_rows_that_were_changed_before_the_decision_permit_nothing(till: Bench) -> None:
    row = await asked(till)
    waiting = (await message_of(till, row)).invocation
    now = shared_time()
    forged = {"state": ApprovalState.APPROVED, "scope": ApprovalScope.CHAT, "decided_by": "shell:root"}
    await change_row(till, **forged, grant_until=now + timedelta(days=1), decided_at=now)
    for invocation in (waiting, waiting.model_copy(update={"call_id": "another"})):
        with pytest.raises(NotApprovedError):
            await deliver(till, signed(till, invocation))

    cleared = dict.fromkeys(("scope", "decided_by", "grant_until", "decided_at"))
    await change_row(till, **cleared, state=ApprovalState.PENDING)
    await change_row(till, arguments=encode_arguments(("eve",), {}))
    with pytest.raises(MessageRefusedError, match="is not the one that approval"):
        await till.services.approval_decisions.approve(row.id, by="shell:root")
    assert (await pending(till)).state is ApprovalState.PENDING and paid(till) == []


async def change_row(bench: Bench, **values: Any) -> None:
    async with bench.database.begin() as tx:
        await tx.connection.execute(update(APPROVALS).values(**values))


@pytest.mark.extended
@pytest.mark.parametrize("kind", ["sqlite"])
async def test_text_of_the_agent_of_code_and_of_plugins_is_no_decision(till: Bench) -> None:
    row = await asked(till)
    line = f"/approve {row.id}"
    await till.say("chat", "go on", user_id="chief")
    code = f"print({line!r})\nopen('/app/shared/note', 'w').write({line!r})\n"
    code += f"send_msg_text(_ck, {line!r})\nkeep({line!r})"
    await till.play("chat", till.drain(Model(code)))
    await till.say("chat", line, user_id="chief")  # as a plugin pushes a message of a person
    for issuer, user_id in (("sse", "u1"), ("key:1", "chief")):
        await till.services.intake.accept(
            IncomingMessage(chat_key="chat", text=line, user_id=user_id, user_name=user_id), issuer=issuer
        )
    await till.play("chat", till.drain(Model("")))
    assert (await pending(till)).state is ApprovalState.PENDING and paid(till) == []
    said = [message.text for message in await till.messages("chat")]
    assert said.count("You may not decide on calls of this chat.") == 2

    accepted = await till.services.intake.accept(
        IncomingMessage(chat_key="chat", text=line, user_id="chief", user_name="Chief"), issuer="sse"
    )
    assert accepted is not None and accepted.turn_id is None
    (decided,) = await approvals(till)
    assert (decided.state, decided.decided_by) == (ApprovalState.APPROVED, "chat:sse:chief")
    assert (await till.messages("chat"))[-1].text == (
        f"Approved: tests.till.pay('ada', amount=3) runs ({row.number})."
    )


async def test_a_turn_ends_once_as_waiting_and_what_the_decision_starts_is_another_one(till: Bench) -> None:
    row = await asked(till)
    waiting = (row.turn_id, {"state": TurnState.WAITING.value, "waits_for": [row.id]})
    assert await turn_ends(till) == [waiting]
    await approve_and_run(till, row)
    assert await turn_ends(till) == [waiting]
    later = (await till.play("chat", till.drain(Model(SAY))))[-1]
    assert await turn_ends(till) == [waiting, (later.turn_id, {"state": "done"})]


@pytest.mark.parametrize("kind", ["sqlite"])
async def test_a_call_that_is_decided_before_its_round_ends_does_not_leave_the_turn_waiting(
    till: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask = ApprovalRequests.ask

    async def decided(self: ApprovalRequests, *args: Any, **options: Any) -> Approval:
        row = await ask(self, *args, **options)
        return await till.services.approval_decisions.deny(row.id, by="shell:root")

    monkeypatch.setattr(ApprovalRequests, "ask", decided)
    await till.say("chat", "hello")
    await till.play("chat", till.drain(Model(PAY, SAY)))
    assert [data for _, data in await turn_ends(till)] == [{"state": "done"}, {"state": "done"}]
    assert [row.state for row in await approvals(till)] == [ApprovalState.DENIED]


@pytest.mark.parametrize("kind", ["sqlite"])
async def test_people_of_a_chat_list_deny_and_get_errors(till: Bench) -> None:
    row = await asked(till)

    async def answer(line: str, *, chat_key: str = "chat") -> str:
        accepted = await till.services.intake.accept(
            IncomingMessage(chat_key=chat_key, text=line, user_id="chief", user_name="Chief"), issuer="sse"
        )
        assert accepted is not None
        return (await till.messages(chat_key))[-1].text

    call = "tests.till.pay('ada', amount=3)"
    assert await answer("/approvals") == f"{row.number} {call}"
    for name in (f"{row.number}", f"#{row.number}", row.id):
        assert (await answer(f"/approvals {name}")).startswith(f"{row.number}: pending\ntests.till.pay(\n")
    for name in ("pay", "till"):
        assert f"write the number of the call:\n{row.number} {call}" in await answer(f"/approve {name}")
    for name in ("ay", "0", row.id[:3], str(row.number + 1), "9" * 15, "9" * 40):
        assert f"no call of this chat has an approval {name}" in await answer(f"/approve {name}")
    assert (await pending(till)).id == row.id, "none of these decides"
    assert "amount=3" in await answer(f"/approvals {row.id[:8]}")
    assert await answer("/approvals", chat_key="other") == "No call waits for approval here."
    assert f"no call of this chat has an approval {row.id}" in await answer(
        f"/approve {row.id}", chat_key="other"
    )
    assert "has an approval" in await answer(f"/approve {row.number}", chat_key="other")
    assert "write /approve NUMBER" in await answer(f"/approve {row.id} forever")
    assert (
        await answer(f"/deny {row.number} too much money") == f"Denied: {call} does not run ({row.number})."
    )
    assert f"approval {row.id} is denied by chat:sse:chief" in await answer(f"/approve {row.id}")
    assert (await approvals(till))[0].reason == "too much money"


@pytest.mark.extended
async def test_a_stopped_or_reset_chat_withdraws_what_waits(till: Bench) -> None:
    row = await asked(till)
    await till.services.stopper.stop("chat", reason="enough", wait_seconds=WAIT_SECONDS)
    (cancelled,) = await approvals(till)
    assert (cancelled.state, cancelled.reason) == (ApprovalState.CANCELLED, "enough")
    assert (await call_of(till, row)).state is CallState.CANCELLED
    with pytest.raises(AlreadyDecidedError):
        await till.services.approval_decisions.approve(row.id, by="shell:root")
    assert len(await till.rounds("chat")) == 1, "the model is not asked again"

    await till.say("chat", "again")
    await till.play("chat", till.drain(Model(PAY)))
    await approve_and_run(till, await pending(till), scope=ApprovalScope.CHAT)
    await till.play("chat", till.drain(Model(SAY)))
    await use_cases.reset_chat(till.services, "chat")
    await till.say("chat", "once more")
    await till.play("chat", till.drain(Model('pay("bob")')))
    await pending(till)
    assert paid(till) == ["paid ada 3"], "an approval for the chat ends with its conversation"


@pytest.mark.extended
@pytest.mark.parametrize("kind", ["sqlite"])
async def test_results_of_every_type_of_method_start_the_next_round(till: Bench) -> None:
    row = await asked(till, 'announce("news")')
    await approve_and_run(till, row)
    model = Model('inspect("safe")')
    rounds = await till.play("chat", till.drain(model))
    assert "announced news" in model.prompts[0]
    assert [item.trigger_kind for item in rounds] == [TriggerKind.MESSAGE, TriggerKind.CALL]
    await approve_and_run(till, await pending(till))
    model = Model(SAY)
    rounds = await till.play("chat", till.drain(model))
    assert "inspected safe" in model.prompts[0]
    assert rounds[-1].trigger_kind is TriggerKind.CALL
    assert paid(till) == ["announced news", "inspected safe"]


@pytest.mark.extended
@pytest.mark.parametrize("kind", ["sqlite"])
async def test_calls_at_once_ask_for_one_approval(till: Bench) -> None:
    code = """
import threading
names = ["ada", "bob", "eve", "dan"]
threads = [threading.Thread(target=pay, args=(name,)) for name in names]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""
    await asked(till, code)
    assert paid(till) == []


@pytest.mark.extended
@pytest.mark.parametrize("kind", ["sqlite"])
async def test_a_call_that_does_not_fit_or_cannot_be_shown_makes_no_request(till: Bench) -> None:
    await till.say("chat", "hello")
    await till.play("chat", till.drain(Model("pay()", "pay('ada', whom=1)", "pay('x' * 70_000)", SAY)))
    assert await approvals(till) == []
    stops = [item.stop_type for item in await till.rounds("chat")]
    assert stops == [StopType.ERROR, StopType.ERROR, StopType.ERROR, StopType.NORMAL]


@pytest.mark.extended
async def test_a_rounds_worker_that_dies_after_the_request_leaves_it_and_makes_no_second_one(
    till: Bench,
) -> None:
    await till.say("chat", "hello")
    ledger = till.services.ledger
    finish = ledger.finish

    async def die(*args: object, **options: object) -> object:
        raise asyncio.CancelledError

    ledger.finish = die  # type: ignore[method-assign, assignment]
    await asyncio.gather(till.drain(Model(PAY)).drain("chat"), return_exceptions=True)
    ledger.finish = finish  # type: ignore[method-assign]
    row = await pending(till)
    await till.let_leases_run_out()
    rounds = await till.play("chat", till.drain(Model(SAY), owner="w2"))
    assert [item.stop_type for item in rounds] == [StopType.APPROVAL], "no round repeats its code"
    await approve_and_run(till, row)
    rounds = await till.play("chat", till.drain(Model(SAY), owner="w2"))
    assert len(rounds) == 2 and paid(till) == ["paid ada 3"]


@pytest.mark.parametrize("kind", ["sqlite"])
async def test_a_worker_that_dies_inside_an_approved_call_leaves_its_outcome_unknown(till: Bench) -> None:
    row = await asked(till)
    await till.services.approval_decisions.approve(row.id, by="shell:root")
    message = await message_of(till, row)
    claims = till.services.call_handler._claims
    held = await claims.claim(till.services.registry.find("pay"), message.invocation, worker="dead")
    assert held.lease is not None
    held.lease.drop()
    claims._under_way.clear()
    await till.let_leases_run_out()
    await till.services.sweeper().sweep()
    assert (await call_of(till, row)).state is CallState.UNKNOWN
    model = Model(SAY)
    await till.play("chat", till.drain(model))
    assert "OutcomeUnknownError" in model.prompts[0]
    with pytest.raises(OutcomeUnknownError):
        await deliver(till, message)
    assert paid(till) == []


@pytest.mark.parametrize("kind", ["sqlite"])
async def test_an_approved_call_runs_once_also_where_its_method_no_longer_requires_approval(
    till: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = await asked(till)
    await till.services.approval_decisions.approve(row.id, by="shell:root")
    monkeypatch.setattr(till.services.registry, "_approval", ApprovalSettings(exempt=("tests.till.*",)))
    till.services.registry.serve(till.services.loaded.plugins)  # type: ignore[attr-defined]
    assert not till.services.registry.find("pay").requires_approval
    message = await message_of(till, row)
    answers = [await deliver(till, message) for _ in range(2)]
    assert answers[0] == answers[1] and paid(till) == ["paid ada 3"]
    assert (await call_of(till, row)).state is CallState.DONE


@pytest.mark.parametrize("kind", ["sqlite"])
async def test_a_lost_message_of_an_approved_call_is_found_by_the_sweep(till: Bench) -> None:
    row = await asked(till)
    await till.services.approval_decisions.approve(row.id, by="shell:root")
    async with till.database.begin() as tx:
        (lost,) = await tx.calls.take_unclaimed(waiting_seconds=0, limit=10)
    assert (lost.id, lost.state) == (row.call_id, CallState.QUEUED)


@pytest.mark.extended
@pytest.mark.parametrize("kind", ["sqlite"])
async def test_ten_thousand_requests_are_listed_decided_expired_and_withdrawn(
    kind: str, open_bench: OpenBench
) -> None:
    bench = await open_till(open_bench, kind)
    first = await asked(bench)
    await copy_rows(bench, CALLS, id="'c' || n", round_id="NULL")
    await copy_rows(
        bench, APPROVALS, sequence=None, id="'a' || n", call_id="'c' || n",
        round_id="NULL", turn_id="NULL", root_turn_id="NULL",
        expires_at=f"CASE WHEN n <= {OVERDUE} THEN requested_at ELSE expires_at END",
    )  # fmt: skip
    seen, before = set(), None
    while True:
        async with bench.database.read() as tx:
            page = await tx.approvals.newest(limit=500, state=ApprovalState.PENDING, before=before)
        if not page:
            break
        seen |= {item.id for item in page}
        before = page[-1].sequence
    assert len(seen) == 10_000
    async with bench.database.read() as tx:
        assert (await tx.overview.approvals()).waiting == 10_000

    decisions = bench.services.approval_decisions
    await approve_and_run(bench, first)
    await decisions.deny("a5000", by="shell:root")
    assert paid(bench) == ["paid ada 3"]
    sweep = ApprovalSweep(bench.database, decisions)
    pauses = []
    while (pause := await sweep.sweep()) is not None and pause <= 0:
        pauses.append(pause)
    assert len(pauses) == 1, "a sweep ends 100 of a chat, so that others can use it meanwhile"
    await bench.services.stopper.stop("chat", reason="enough", wait_seconds=WAIT_SECONDS)
    async with bench.database.read() as tx:
        found = await tx.connection.exec_driver_sql("SELECT state, count(*) FROM approvals GROUP BY state")
        approval_states = {state: count for state, count in found}
        found = await tx.connection.exec_driver_sql("SELECT state, count(*) FROM calls GROUP BY state")
        call_states = {state: count for state, count in found}
        events = await tx.connection.exec_driver_sql(
            "SELECT count(*) FROM chat_events WHERE type = 'approval.decided'"
        )
        assert events.scalar() == 10_000
    cancelled = 9_998 - OVERDUE
    assert approval_states == {"approved": 1, "denied": 1, "expired": OVERDUE, "cancelled": cancelled}
    assert call_states == {"done": 1, "failed": 1 + OVERDUE, "cancelled": cancelled}


#: Requests that expire in the test above.
OVERDUE = 110


async def copy_rows(bench: Bench, table: Table, **changed: str | None) -> None:
    """Copy the only row of a table 9,999 times.

    Args:
        changed: expressions of columns by ``n``, the number of the copy; None leaves one to the database.
    """
    columns = [column.name for column in table.columns if changed.get(column.name, "") is not None]
    values = ", ".join(changed.get(name) or f"{table.name}.{name}" for name in columns)
    async with bench.database.begin() as tx:
        await tx.connection.exec_driver_sql(
            f"INSERT INTO {table.name} ({', '.join(columns)})"
            " WITH RECURSIVE numbers (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM numbers WHERE n < 9999)"
            f" SELECT {values} FROM {table.name} CROSS JOIN numbers"
        )
