"""Real workers as operators see them: logs, metrics, probes."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from forked_process import run_forked
from prometheus_client.parser import text_string_to_metric_families
from redis_process import free_port
from waiting import WAIT_SECONDS, eventually

from broker_config.secret_files import monitoring_key
from broker_config.settings import DatabaseSettings
from nekro.app import use_cases
from nekro.app.fleet_metrics import FleetFigures
from nekro.wire.invocation import Invocation, new_id
from nekro.wire.values import encode_arguments
from nekro_agent.errors import MethodFailedError
from nekro_agent.ports import ChatInfo

pytestmark = pytest.mark.extended

CHAT = "watched-chat"


class Observed:
    """A worker of lane ``methods`` with an endpoint and JSON lines."""

    def __init__(self, fleet: Any, port: int) -> None:
        self.fleet, self.port = fleet, port
        (self.worker,) = fleet.start("methods")

    def get(self, path: str) -> tuple[int, str]:
        try:
            key = monitoring_key(self.fleet.settings.data_dir)[1]
            asked = urllib.request.Request(
                f"http://127.0.0.1:{self.port}{path}", headers={"Authorization": f"Bearer {key}"}
            )
            with urllib.request.urlopen(asked, timeout=WAIT_SECONDS) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as exc:
            with exc:
                return exc.code, exc.read().decode()

    def figure(self, name: str, **labels: str) -> float:
        families = text_string_to_metric_families(self.get("/metrics")[1])
        samples = (sample for family in families for sample in family.samples)
        wanted = labels.items()
        return sum(s.value for s in samples if s.name == name and wanted <= s.labels.items())

    async def ended(self, call_id: str) -> list[dict[str, Any]]:
        """Lines of a call after its end, which its caller learns of a moment earlier."""

        def has_ended() -> list[dict[str, Any]]:
            lines = [line for line in self.lines() if line.get("call_id") == call_id]
            return lines if any(line["event"] == "call_ended" for line in lines) else []

        found: list[dict[str, Any]] = await eventually(has_ended, what=f"the end of call {call_id}")
        return found

    def lines(self) -> list[dict[str, Any]]:
        """The worker's log, without an incomplete last line."""
        text, _, _ = self.worker.log.read_text().rpartition("\n")
        return [json.loads(line) for line in text.splitlines()]


@pytest.fixture(scope="module")
def database_url(sqlite_url: str) -> str:
    """One kind of database suffices here: the repositories have tests on both."""
    return sqlite_url


@pytest.fixture(scope="module")
def observed(make_fleet: Callable[..., Any]) -> Iterator[Observed]:
    port = free_port()
    # Short, as a socket's path must be; private, as other workers of this user may run here.
    with tempfile.TemporaryDirectory(prefix="nk") as directory, pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", directory)
        yield Observed(make_fleet(metrics={"port": port}, log={"json_lines": True}), port)


async def call(observed: Observed, method: str, *args: Any) -> str:
    """Call a method; returns the call's id."""
    services = observed.fleet.services()
    await services.start()
    try:
        envelope = await use_cases.invoke(
            services, method, args, {}, chat_key=CHAT, user_id="u", timeout_seconds=WAIT_SECONDS
        )
        return str(envelope.call_id)
    finally:
        await services.close()


async def test_a_call_leaves_one_line_with_its_ids_and_no_argument(observed: Observed) -> None:
    call_id = await call(observed, "length", b"argument-in-confidence")
    lines = await observed.ended(call_id)
    assert [line["event"] for line in lines] == ["call_ended"]
    assert lines[0]["method"] == "tests.probe.length" and lines[0]["chat_key"] == CHAT
    assert lines[0]["outcome"] == "ok" and 0 < lines[0]["seconds"] < WAIT_SECONDS
    assert lines[0]["lane"] == "methods" and lines[0]["worker"].startswith("methods-0@")
    assert "in-confidence" not in observed.worker.log.read_text()


async def test_a_failure_shows_its_traceback_under_its_call_and_no_secret(observed: Observed) -> None:
    with pytest.raises(MethodFailedError):
        await call(observed, "fail_with", "test-signing-key is the key")

    def lines() -> list[dict[str, Any]]:
        return [line for line in observed.lines() if line.get("method") == "tests.probe.fail_with"]

    # The caller gets the error before the worker has logged it.
    (first, *_) = await eventually(lines, what=observed.fleet.waiting_for("the failure in the log"))
    failed = await observed.ended(first["call_id"])
    assert [line["logger"] for line in failed] == ["celery.app.trace", "nekro"]
    assert failed[0]["call_id"] == failed[1]["call_id"] and failed[0]["chat_key"] == CHAT
    assert "in fail_with" in failed[0]["exception"] and "[secret] is the key" in failed[0]["exception"]
    assert failed[1]["outcome"] == "method_failed"
    assert "test-signing-key" not in observed.worker.log.read_text()


async def test_metrics_count_calls_by_method_and_outcome(observed: Observed) -> None:
    before = observed.figure("nekro_calls_total", method="tests.probe.add", outcome="ok")
    await observed.ended(await call(observed, "add", 1, 2))
    assert observed.figure("nekro_calls_total", method="tests.probe.add", outcome="ok") == before + 1
    assert observed.figure("nekro_call_seconds_count", method="tests.probe.add") == before + 1
    assert observed.figure("nekro_call_wait_seconds_count") > 0
    assert observed.figure("nekro_calls_in_flight") == 0
    assert observed.figure("nekro_worker_info", lane="methods") == 1
    assert observed.figure("process_resident_memory_bytes") > 1 << 20


def test_a_ready_worker_reports_ready_and_a_stopping_one_does_not(observed: Observed) -> None:
    assert observed.get("/livez")[0] == 200
    status, body = observed.get("/readyz")
    assert (status, json.loads(body)["faults"]) == (200, [])
    assert observed.get("/elsewhere")[0] == 404


def test_the_check_of_the_command_line_equals_the_container_probe(observed: Observed, tmp_path: Path) -> None:
    def check(*arguments: str, broker: str | None = None) -> subprocess.CompletedProcess[str]:
        prefix = observed.fleet.settings.broker.key_prefix
        settings = {"NEKRO_BROKER__URL": broker, "NEKRO_BROKER__KEY_PREFIX": prefix} if broker else {}
        return run_forked(
            "nekro.cli.main", "worker", "--check", *arguments, environ={**os.environ, **settings}
        )

    ready = check("ready", "--json")
    mine = [a for a in json.loads(ready.stdout) if a["pid"] == observed.worker.process.pid]
    assert [(a["ok"], a["lane"], a["faults"]) for a in mine] == [(True, "methods", [])]
    assert check("live", "--lane", "methods").returncode == 0
    name = mine[0]["worker"]
    assert check("--name", name).stdout == f"{name}: ready\n"
    assert check("--name", name.partition("@")[0], "--json").returncode == 0
    used = observed.fleet.settings
    own = check("--data-dir", str(used.data_dir), broker=used.broker.url)
    assert (own.returncode, name in own.stdout) == (0, True), own.stderr
    for other in (
        check("--name", "other"),
        check("--name", name, "--data-dir", str(tmp_path)),
        check("--name", name, broker="redis://127.0.0.1:1/0"),
    ):
        assert (other.returncode, other.stdout) == (13, "")
        assert "no worker named" in other.stderr
    for directory, is_named in ((used.data_dir, True), (tmp_path, False)):
        found = run_forked(
            "nekro.cli.main", "doctor", "--json", "--data-dir", str(directory), environ={**os.environ}
        )
        assert (f"worker {name} " in found.stdout) is is_named
    no_worker = run_forked(
        "nekro.cli.main", "worker", "--check", environ={**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)}
    )
    assert no_worker.returncode == 13 and "no worker runs on this host" in no_worker.stderr


async def test_fleet_metrics_count_messages_in_lanes_without_workers(observed: Observed) -> None:
    settings = observed.fleet.settings
    services = observed.fleet.services()
    await services.start()
    try:
        await use_cases.receive_message(services, "waiting", "hello", user_id="u", user_name="U")
        entry = await services.find_method("add")
        arguments = encode_arguments((1, 2), {})
        chat = await services.chat(CHAT)
        waiting = asyncio.create_task(
            services._caller.call(invocation_of(entry.task, chat, arguments), lane="long")
        )
        figures = FleetFigures(settings)
        try:

            async def waits() -> dict[tuple[str, str], float]:
                found = samples(await asyncio.to_thread(figures.text))
                return found if found["nekro_queue_messages", "long"] >= 1 else {}

            found = await eventually(waits, what="the call to wait in its queue")
        finally:
            figures.close()
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
    finally:
        await services.close()
    assert found["nekro_up", "broker"] == found["nekro_up", "database"] == 1
    assert found["nekro_lane_workers", "methods"] == 1 and found["nekro_lane_workers", "long"] == 0
    assert found["nekro_rounds_waiting", ""] == 1
    assert found["nekro_queue_oldest_seconds", "long"] > 0
    assert found["nekro_queue_oldest_seconds", "rounds"] >= 0
    assert found["nekro_queue_messages", "rounds"] >= 1 and found["nekro_dead_messages", ""] == 0


async def test_fleet_metrics_name_the_component_that_is_down(observed: Observed) -> None:
    broker = observed.fleet.settings.broker.model_copy(update={"url": f"redis://127.0.0.1:{free_port()}/0"})
    database = DatabaseSettings(url="sqlite:////nowhere/at/all.db")
    figures = FleetFigures(
        observed.fleet.settings.model_copy(update={"broker": broker, "database": database})
    )
    try:
        found = samples(await asyncio.to_thread(figures.text))
    finally:
        figures.close()
    assert found == {("nekro_up", "broker"): 0, ("nekro_up", "database"): 0}


def samples(text: bytes) -> dict[tuple[str, str], float]:
    """Metrics by name and the value of their one label."""
    families = text_string_to_metric_families(text.decode())
    return {
        (sample.name, next(iter(sample.labels.values()), "")): sample.value
        for family in families
        for sample in family.samples
    }


def invocation_of(task: str, chat: ChatInfo, arguments: str) -> Invocation:
    """A call of a method on a given lane."""
    moment = datetime.now(UTC)
    return Invocation(
        call_id=new_id(),
        method=task,
        chat_key=chat.chat_key,
        container_key=chat.container_key,
        issued_at=moment,
        deadline=moment + timedelta(seconds=WAIT_SECONDS),
        args=arguments,
    )
