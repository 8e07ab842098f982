"""Programs that go on after a decision on their call: at its line, with its value, without a model."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest
from round_bench import Bench, Model
from test_rounds_approval import SAY, approvals, approve_and_run, asked, open_till, paid, pending

from nekro.app.calls import waits as program_waits
from nekro.sandbox.models import StopType
from storage.states import ApprovalScope, TriggerKind

OpenBench = Callable[..., Awaitable[Bench]]
PAY = """
import random, time
begun, lots = time.time_ns(), [random.random(), tick("once")]
print("before")
receipt = pay("ada", amount=3)
print(receipt, lots[1])
tick(f"{begun} {lots[0]}")
send_msg_text(_ck, "paid")
"""
LOOP = """
for name in ("ada", "bob", "eve"):
    try:
        print(pay(name))
    except ApprovalDeniedError as exc:
        print("denied:", exc)
announce("all asked")
"""


@pytest.fixture
async def till(kind: str, open_bench: OpenBench) -> Bench:
    """A bench with methods that require approval."""
    return await open_till(open_bench, kind, resume="program")


async def go_on(bench: Bench, model: Model | None = None) -> Model:
    """Run what was requested."""
    model = model or Model(SAY)
    await bench.play("chat", bench.drain(model, owner="w2"))
    return model


async def test_an_approved_call_is_the_value_of_its_line(till: Bench) -> None:
    row = await asked(till, PAY)
    first = (await till.rounds("chat"))[-1]
    await approve_and_run(till, row)
    model = await go_on(till)
    assert model.prompts == []
    _, second = await till.rounds("chat")
    assert (second.trigger_kind, second.stop_type) == (TriggerKind.CALL, StopType.NORMAL)
    assert second.program_id == first.id
    assert second.output == "before\nreceipt ada 3 once\n"
    assert paid(till) == ["paid ada 3"]
    ticks = [line for line in till.journal() if line.startswith("tick")]
    assert ticks[0] == "tick once" and len(ticks) == 2
    said = [message.text for message in await till.messages("chat")]
    assert said[-1] == "paid" and not any("returned" in text for text in said)
    async with till.database.read() as tx:
        types = [event.type for event in await tx.events.of_turn(second.turn_id)]
    assert types[0] == "turn.started" and types[-1] == "turn.ended"


async def test_a_loop_asks_one_after_the_other_and_a_denied_call_raises(till: Bench) -> None:
    row = await asked(till, LOOP)
    await approve_and_run(till, row)
    await go_on(till)
    second = await pending(till)
    await till.services.approval_decisions.deny(second.id, by="shell:root", reason="too much")
    await go_on(till)
    third = await pending(till)
    await approve_and_run(till, third)
    await go_on(till)
    fourth = await pending(till)
    assert fourth.method == "tests.till.announce"
    await approve_and_run(till, fourth)
    model = await go_on(till)
    last = (await till.rounds("chat"))[-1]
    assert model.prompts == [] and last.stop_type == StopType.NORMAL
    denied = f"denied: ApprovalDeniedError: approval {second.id}: shell:root denied it: too much"
    assert last.output == f"receipt ada 1\n{denied}\nreceipt eve 1\n"
    assert paid(till) == ["paid ada 1", "paid eve 1", "announced all asked"]


@pytest.mark.parametrize("kind", ["sqlite"])
async def test_approval_for_the_turn_lets_the_rest_of_the_program_pass(till: Bench) -> None:
    row = await asked(till, LOOP.replace("announce", "print"))
    await approve_and_run(till, row, scope=ApprovalScope.TURN)
    model = await go_on(till)
    assert model.prompts == [] and len(await approvals(till)) == 1
    assert paid(till) == ["paid ada 1", "paid bob 1", "paid eve 1"]


async def test_what_a_program_waits_with_is_in_the_database(till: Bench) -> None:
    row = await asked(till, PAY)
    till.caller.lose_everything()
    await approve_and_run(till, row)
    model = await go_on(till)
    last = (await till.rounds("chat"))[-1]
    assert model.prompts == [] and last.output == "before\nreceipt ada 3 once\n"
    assert [line for line in till.journal() if line.startswith("tick once")] == ["tick once"]


@pytest.mark.parametrize("kind", ["sqlite"])
async def test_a_denied_call_that_nothing_catches_is_an_error_for_the_model(till: Bench) -> None:
    row = await asked(till, PAY)
    await till.services.approval_decisions.deny(row.id, by="shell:root", reason="no")
    model = await go_on(till)
    assert len(model.prompts) == 1
    assert "ApprovalDeniedError" in model.prompts[0] and "denied it: no" in model.prompts[0]
    assert model.prompts[0].count("import random, time") == 1, "its program is shown once"
    assert paid(till) == []


@pytest.mark.parametrize("kind", ["sqlite"])
async def test_an_agent_method_wakes_the_model_with_its_result(till: Bench) -> None:
    row = await asked(till, 'inspect("it")\nprint("never")')
    await approve_and_run(till, row)
    model = await go_on(till)
    assert len(model.prompts) == 1 and "inspected it" in model.prompts[0]
    with pytest.raises(IndexError):
        async with till.database.read() as tx:
            _ = (await tx.parked_programs.of_program((await till.rounds("chat"))[0].id))[0]


@pytest.mark.parametrize("kind", ["sqlite"])
async def test_a_message_that_comes_while_a_program_waits_is_answered(till: Bench) -> None:
    row = await asked(till, PAY)
    await till.say("chat", "are you there?")
    model = await go_on(till, Model('send_msg_text(_ck, "yes")'))
    assert len(model.prompts) == 1
    await till.say("chat", "still?")
    await approve_and_run(till, row)
    model = await go_on(till, Model('send_msg_text(_ck, "still")'))
    assert len(model.prompts) == 1 and "still?" in model.prompts[0]
    said = [message.text for message in await till.messages("chat")]
    assert said.count("paid") == said.count("yes") == said.count("still") == 1


@pytest.mark.parametrize("kind", ["sqlite"])
async def test_a_cancelled_program_does_not_go_on(till: Bench) -> None:
    row = await asked(till, PAY)
    await till.services.endings.cancel("chat", reason="enough")
    with pytest.raises(Exception, match="cancelled"):
        await till.services.approval_decisions.approve(row.id, by="shell:root")
    model = await go_on(till)
    assert model.prompts == [] and len(await till.rounds("chat")) == 1


@pytest.mark.parametrize("kind", ["sqlite"])
async def test_of_too_many_programs_of_a_chat_the_model_goes_on(
    till: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(program_waits, "MOST_OPEN", 1)
    await asked(till, PAY)
    await till.say("chat", "again")
    await till.play("chat", till.drain(Model(PAY.replace("ada", "bob"))))
    second, first = await approvals(till)
    async with till.database.read() as tx:
        waits = [await tx.parked_programs.waiting_for(row.call_id) for row in (first, second)]
    assert [wait is not None for wait in waits] == [True, False]
    await approve_and_run(till, second)
    model = await go_on(till)
    assert len(model.prompts) == 1 and "receipt bob 3" in model.prompts[0]
    await approve_and_run(till, first)
    assert (await go_on(till)).prompts == []
    assert paid(till) == ["paid bob 3", "paid ada 3"]
