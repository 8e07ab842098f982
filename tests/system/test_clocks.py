"""Hosts with wrong clocks: processes with a clock an hour ahead or behind behave like the others.

On PostgreSQL: with SQLite every process is on the database's host and shares its clock.
"""

from __future__ import annotations

import asyncio
import json
import re
import urllib.request
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from late_call import check_refusal
from redis_process import free_port
from shifted_clock import shifted_clock
from waiting import WAIT_SECONDS, eventually, wait_until

from broker_config.secret_files import monitoring_key
from nekro.app import use_cases
from nekro.app.services import Services
from nekro.wire.values import decode_value
from storage.repositories.calls import CallRepository
from storage.repositories.messages import MessageRepository
from storage.repositories.rounds import RoundRepository
from storage.states import FINAL_ROUND_STATES, RoundState

pytestmark = pytest.mark.extended

CHAT = "platform:group/1"
HOUR = 3600
SCRIPT = """
- when: 'greet me'
  answer: |
    ```python
    send_msg_text(_ck, "hello")
    ```
"""

both_ways = pytest.mark.parametrize("shift_seconds", [HOUR, -HOUR], ids=["ahead", "behind"])


@pytest.fixture(scope="module")
def database_url(postgres_server: Any) -> str:
    return str(postgres_server.create_database())


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llm") / "script.yaml"
    path.write_text(SCRIPT)
    return path


class Shifted:
    """A system with one worker of lane ``methods`` whose clock is wrong; all others are right."""

    def __init__(self, make_fleet: Callable[..., Any], script: Path, seconds: int) -> None:
        self.seconds, self.port = seconds, free_port()
        self.fleet = make_fleet(metrics={"port": self.port}, llm={"script": script})
        (self.worker,) = self.fleet.start("methods", variables=shifted_clock(seconds))

    def offset(self, peer: str) -> float | None:
        """The clock's deviation according to the worker's metrics; None: not measured yet."""
        key = monitoring_key(self.fleet.settings.data_dir)[1]
        asked = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/metrics", headers={"Authorization": f"Bearer {key}"}
        )
        with urllib.request.urlopen(asked, timeout=WAIT_SECONDS) as page:
            found = re.search(
                rf'^nekro_clock_offset_seconds{{peer="{peer}"}} (\S+)$', page.read().decode(), re.M
            )
        return None if found is None else float(found[1])


@pytest.fixture(scope="module", params=[HOUR, -HOUR], ids=["ahead", "behind"])
def shifted(request: pytest.FixtureRequest, make_fleet: Callable[..., Any], script: Path) -> Shifted:
    return Shifted(make_fleet, script, request.param)


@pytest.fixture
async def services(shifted: Shifted) -> AsyncIterator[Services]:
    services = shifted.fleet.services()
    await services.start()
    yield services
    await services.close()


@pytest.fixture(scope="module")
def fleet(make_fleet: Callable[..., Any], script: Path) -> Any:
    """A system whose workers have the right time."""
    system = make_fleet(llm={"script": script})
    system.start("methods")
    return system


async def test_a_worker_with_a_wrong_clock_runs_calls(services: Services) -> None:
    envelope = await use_cases.invoke(
        services, "add", (1, 2), {}, chat_key=CHAT, user_id="u1", timeout_seconds=WAIT_SECONDS
    )
    assert decode_value(envelope.value_bytes(), max_bytes=1 << 20) == 3
    age = datetime.now(UTC) - envelope.started_at
    assert timedelta() <= age + timedelta(seconds=1) and age < timedelta(seconds=WAIT_SECONDS)


async def test_a_worker_with_a_wrong_clock_starts_no_late_call(services: Services) -> None:
    await check_refusal(services, chat_key=CHAT, deadline=datetime.now(UTC) - timedelta(seconds=1))


async def test_a_worker_with_a_wrong_clock_accepts_signed_commands(services: Services) -> None:
    control = services.app.control
    assert await asyncio.to_thread(lambda: control.ping(timeout=WAIT_SECONDS, limit=1))


async def test_a_worker_with_a_wrong_clock_reports_it_in_its_metrics_and_log(shifted: Shifted) -> None:
    for peer in ("database", "broker"):
        offset = wait_until(lambda peer=peer: shifted.offset(peer), what=f"the offset to the {peer}")
        assert offset == pytest.approx(shifted.seconds, abs=WAIT_SECONDS)
    assert "host_clock_off" in shifted.worker.log.read_text()


@both_ways
async def test_a_call_of_a_caller_with_a_wrong_clock_has_exactly_its_time_limit(
    fleet: Any, shift_seconds: int
) -> None:
    ended = await asyncio.to_thread(
        fleet.run, "call", "remember", "--args", '["milk"]', "--timeout", str(WAIT_SECONDS), "--json",
        variables=shifted_clock(shift_seconds),
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr + fleet.logs()
    services = fleet.services()
    async with services.database.read() as transaction:
        row = await CallRepository(transaction.connection).get(json.loads(ended.stdout)["id"])
    await services.database.dispose()
    assert row is not None and row.deadline is not None
    assert 0 < (row.deadline - row.requested_at).total_seconds() <= WAIT_SECONDS + 1


async def test_a_command_of_a_host_with_a_wrong_clock_reaches_the_workers(fleet: Any) -> None:
    ended = await asyncio.to_thread(fleet.run, "doctor", "--json", variables=shifted_clock(HOUR))
    checks = {check["name"]: check for check in json.loads(ended.stdout)}
    assert "methods" in checks["workers"]["detail"], ended.stdout
    assert re.search(r"\b(3599|3600)\b", checks["clock of the database"]["detail"])


@pytest.fixture(params=[HOUR, -HOUR], ids=["ahead", "behind"])
def rounds_fleet(request: pytest.FixtureRequest, make_fleet: Callable[..., Any], script: Path) -> Any:
    """A system whose rounds worker has a wrong clock."""
    system = make_fleet(llm={"script": script}, agent={"lease_seconds": 3, "turn_seconds": WAIT_SECONDS})
    system.start("methods")
    system.start("rounds", variables=shifted_clock(request.param))
    return system


async def test_a_rounds_worker_with_a_wrong_clock_applies_the_time_limit_of_a_turn(rounds_fleet: Any) -> None:
    services = rounds_fleet.services()
    await services.start()

    async def ended() -> Any:
        async with services.database.read() as transaction:
            found = await RoundRepository(transaction.connection).newest(CHAT, limit=1)
        return [item for item in found if item.state in FINAL_ROUND_STATES]

    try:
        await use_cases.receive_message(services, CHAT, "greet me", user_id="u1", user_name="Ada")
        (item,) = await eventually(ended, what=rounds_fleet.waiting_for("the end of the round"))
        async with services.database.read() as transaction:
            messages = await MessageRepository(transaction.connection).newest(CHAT, limit=5)
    finally:
        await services.close()
    assert item.state is RoundState.DONE, rounds_fleet.logs()
    assert messages[-1].text == "hello"
