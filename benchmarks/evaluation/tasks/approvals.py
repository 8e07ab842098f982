"""Calls that a person approves, changes or refuses."""

from __future__ import annotations

from typing import Final

from benchmarks.evaluation.checks import has_effect, no_effect, sends
from benchmarks.evaluation.task import Task, approve, call, deny, program, says, words

__all__ = ["TASKS"]

TASKS: Final = (
    Task(
        name="approved_payment",
        person=[says("Pay 40 EUR to Holz and tell me the receipt.")],
        decisions=[approve()],
        model=[
            # It goes on after the decision.
            program('send_msg_text(_ck, pay("Holz", 40))'),
        ],
        tools=[
            call("pay", {"who": "Holz", "amount": 40}),
            words("Paid; the receipt is ${receipt}.", after=r"receipt (?P<receipt>R-\d+)"),
        ],
        outcome=[has_effect("payment", who="Holz", amount=40), sends("R-440")],
    ),
    Task(
        name="refused_payment",
        person=[says("Pay 900 EUR to Lumen.")],
        decisions=[deny("the budget of May is used up")],
        model=[
            program('pay("Lumen", 900)'),
            words("It was refused: ${why}.", after=r"(?P<why>the budget of May is used up)"),
        ],
        tools=[
            call("pay", {"who": "Lumen", "amount": 900}),
            words("It was refused: ${why}.", after=r"(?P<why>the budget of May is used up)"),
        ],
        outcome=[no_effect("payment"), sends("budget")],
    ),
    Task(
        name="changed_payment",
        person=[says("Pay 300 EUR to Weave and tell me how much was really paid.")],
        decisions=[approve(kwargs={"who": "Weave", "amount": 250})],
        model=[
            program('send_msg_text(_ck, pay("Weave", 300))'),
        ],
        tools=[
            call("pay", {"who": "Weave", "amount": 300}),
            words("${amount} EUR were paid.", after=r"Paid (?P<amount>\d+) EUR to Weave"),
        ],
        outcome=[has_effect("payment", who="Weave", amount=250), has_effect("payment"), sends("250")],
    ),
    Task(
        name="approval_for_a_turn",
        person=[says("Pay 15 EUR to Tick and 20 EUR to Lumen.")],
        decisions=[approve(scope="turn"), approve()],
        model=[
            # The second call is permitted by the first approval.
            program('send_msg_text(_ck, pay("Tick", 15) + " " + pay("Lumen", 20))'),
        ],
        tools=[
            call("pay", {"who": "Tick", "amount": 15}),
            call("pay", {"who": "Lumen", "amount": 20}, after="Paid 15 EUR to Tick"),
            words("Both are paid.", after="Paid 20 EUR to Lumen"),
        ],
        outcome=[
            has_effect("payment", who="Tick", amount=15),
            has_effect("payment", who="Lumen", amount=20),
            has_effect("payment", times=2),
        ],
    ),
    Task(
        name="letter_after_a_look_up",
        person=[
            says("Write to the manager of Ken that the room Delta is booked, and say whom you wrote to.")
        ],
        decisions=[approve()],
        model=[
            program("""
                manager = manager_of("Ken")
                send_letter(manager, f"Dear {manager}, the room Delta is booked.")
                send_msg_text(_ck, f"I wrote to {manager}.")
            """),
        ],
        tools=[
            call("manager_of", {"name": "Ken"}),
            call(
                "send_letter",
                '{"to": "${who}", "text": "Dear ${who}, the room Delta is booked."}',
                after=r"(?P<who>[A-Z]\w+)",
            ),
            words("I wrote to ${who}.", after=r"is on its way"),
        ],
        outcome=[has_effect("letter", to="Lis"), sends("Lis")],
    ),
)
