"""Approved calls while everything is killed: each runs once, or its chat reads that this is unknown."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from chaos_world import opened, rows
from waiting import eventually
from worker_fleet import Fleet

from nekro.app import use_cases
from nekro.app.services import Services
from storage.accounts.approvals import Approval
from storage.states import ApprovalState

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

TILL = Path(__file__).parent.parent / "rounds" / "approval_plugins"
CHATS = 12
SCRIPT = """
- when: 'receipt (\\w+)'
  answer: |
    ```python
    send_msg_text(_ck, "told: paid")
    ```
- when: 'pay_slowly .job \\w+. failed'
  answer: |
    ```python
    send_msg_text(_ck, "told: failed")
    ```
- when: 'pay_slowly did not run'
  answer: |
    ```python
    send_msg_text(_ck, "told: not run")
    ```
- when: 'please pay (\\w+)'
  anywhere: true
  answer: |
    ```python
    pay_slowly("${1}")
    ```
"""


@pytest.fixture
def fleet(make_chaos: Callable[..., Fleet], each_database: str, tmp_path: Path) -> Fleet:
    script = tmp_path / "script.yaml"
    script.write_text(SCRIPT)
    return make_chaos(
        each_database,
        plugins={"dirs": (TILL,)},
        llm={"script": script},
        agent={"lease_seconds": 3},
        workers={"call_timeout_seconds": 240},
        sandbox={"max_concurrent": 2},
    )


def journal(fleet: Fleet) -> Counter[str]:
    path = fleet.settings.data_dir / "plugins" / "tests.till" / "journal.txt"
    return Counter(path.read_text().splitlines() if path.exists() else ())


async def pending(services: Services) -> list[Approval]:
    async with services.database.read() as tx:
        return await tx.approvals.newest(limit=1000, state=ApprovalState.PENDING)


async def open_calls(services: Services) -> Sequence[Any]:
    states = "'awaiting', 'queued', 'running'"
    return await rows(
        services, f"SELECT id FROM calls WHERE method LIKE '%pay_slowly' AND state IN ({states})"
    )


async def test_everything_is_killed_around_requests_decisions_and_runs(fleet: Fleet, own_redis: Any) -> None:
    names = [f"n{number}" for number in range(CHATS)]
    fleet.start("methods")
    (rounds,) = fleet.start("rounds", concurrency=4)
    async with opened(fleet) as services:
        for name in names:
            await use_cases.receive_message(services, name, f"please pay {name}", user_id="u", user_name="u")
        # Between call and request: the worker that runs the programs dies.
        await eventually(lambda: pending(services), what="the first request")
        rounds.kill()
        fleet.start("rounds", concurrency=4)

        async def all_asked() -> bool:
            return {row.chat_key for row in await pending(services)} == set(names)

        await eventually(all_asked, what="a request of each chat", seconds=120)
        asked = await pending(services)
        assert len(asked) == CHATS, "no round repeats a program whose call waits"
        # Between request and decision: every process dies, and Redis loses its data.
        for worker in fleet.workers:
            if worker.process.poll() is None:
                worker.kill()
        own_redis.kill()
        own_redis.forget()
        own_redis.start()
        assert len(await pending(services)) == CHATS
        decisions = services.approval_decisions
        for row in asked[1:]:
            await decisions.approve(row.id, by="shell:root")
        await decisions.deny(asked[0].id, by="shell:root")
        # Between decision and run: Redis dies with the messages.
        own_redis.kill()
        own_redis.forget()
        own_redis.start()
        (methods,) = fleet.start("methods", concurrency=3)
        # Inside the run.
        await eventually(lambda: journal(fleet), what="a call to begin", seconds=120)
        methods.kill()
        fleet.start("methods", "rounds", concurrency=3)

        async def quiet() -> bool:
            waiting = "SELECT 1 FROM rounds WHERE state IN ('requested', 'running')"
            return not (await open_calls(services) or await rows(services, waiting))

        await eventually(quiet, what="the end of all calls and rounds", seconds=120)
        await account(fleet, services, asked)


async def account(fleet: Fleet, services: Services, asked: list[Approval]) -> None:
    noted = journal(fleet)
    assert all(count == 1 for count in noted.values()), noted
    states = Counter()
    for row in asked:
        async with services.database.read() as tx:
            call = await tx.calls.get(row.call_id)
            said = [message.text for message in await tx.messages.newest(row.chat_key, limit=50)]
        states[call.state.value] += 1
        if call.state.value == "done":
            assert noted[f"paid {row.chat_key}"] == 1 and "told: paid" in said
        elif call.state.value == "unknown":
            # It may have died between the claim and the first line of the method.
            assert any("OutcomeUnknownError" in text for text in said)
        else:
            assert call.state.value == "failed" and noted[f"begin {row.chat_key}"] == 0
            assert any("did not run" in text for text in said)
    assert states["failed"] == 1 and states["done"] > 0, states
    assert states["unknown"] <= 3, "only what ran in the killed worker"
