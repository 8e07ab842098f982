"""One turn is one trace: spans of several processes, received by a collector on loopback."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from gateway_process import GatewayProcess
from prometheus_client.parser import text_string_to_metric_families
from redis_process import free_port
from trace_collector import Collector
from waiting import WAIT_SECONDS, eventually

from broker_config.secret_files import monitoring_key
from nekro.app import use_cases
from nekro.app.services import Services
from nekro.broker.tracing import TurnTrace
from storage.states import ApprovalState, TriggerKind

pytestmark = pytest.mark.extended

HERE = Path(__file__).parent
SECRET = "open-sesame"
TURN = "invoke_agent nekro"
DONE = "```python\nsend_msg_text(_ck, 'done')\n```"
SCRIPT = [
    {"when": "parcel delivered|Background task|write_text \\(job", "answer": DONE},
    {"when": "fail please", "answer": f"```python\nfail_with('{SECRET}')\n```"},
    {"when": "add please", "answer": f"```python\nremember('{SECRET}')\nlook_up('{SECRET}')\n```"},
    {"when": "ask please", "answer": "```python\nwrite_text('a.txt', 'b')\n```"},
    {"when": "carry please", "answer": "```python\nsend_parcel('carry')\n```"},
    {"when": "lose please", "answer": "```python\nsend_parcel('lose')\n```"},
    {"when": ".", "answer": DONE},
]


@pytest.fixture(scope="module")
def database_url(sqlite_url: str) -> str:
    """One kind of database suffices here."""
    return sqlite_url


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    collector = Collector()
    yield collector
    collector.close()


@pytest.fixture(scope="module")
def metrics_port() -> int:
    """The first of three, of the workers; the order in which they take them is not known."""
    return free_port()


@pytest.fixture(scope="module")
def fleet(
    make_fleet: Callable[..., Any],
    collector: Collector,
    metrics_port: int,
    fleet_plugins: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Any]:
    script: Path = tmp_path_factory.mktemp("llm") / "script.yaml"
    script.write_text(yaml.safe_dump(SCRIPT))
    # Short, as a socket's path must be; private, as other workers of this user may run here.
    with tempfile.TemporaryDirectory(prefix="nk") as directory, pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", directory)
        patch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
        system = make_fleet(
            llm={"script": script},
            tracing={"enabled": True, "url_template": "https://traces.example/t/{trace_id}?tab=1"},
            agent={"debounce_seconds": 0},
            metrics={"port": metrics_port},
            approval={"require": ("tests.probe.write_text",)},
            plugins={"dirs": (fleet_plugins, HERE / "trace_plugins")},
        )
        system.start("methods", "long", "rounds")
        yield system
        system.stop()  # stops before the collector


@asynccontextmanager
async def services_of(fleet: Any) -> AsyncIterator[Services]:
    services = fleet.services()
    await services.start()
    try:
        yield services
    finally:
        await services.close()


async def say(fleet: Any, chat_key: str, text: str) -> str:
    """Write to a chat; returns the id of the turn."""
    async with services_of(fleet) as services:
        message_id = await use_cases.receive_message(services, chat_key, text, user_id="u1", user_name="Ada")
        async with services.database.read() as transaction:
            first = await transaction.rounds.find_by_trigger(TriggerKind.MESSAGE, message_id)
    assert first is not None
    return first.turn_id


def trace_of(turn_id: str) -> bytes:
    return TurnTrace(turn_id=turn_id, root_turn_id=turn_id).trace_id.to_bytes(16)


async def test_a_turn_of_two_rounds_is_one_trace_from_the_turn_to_the_workers_of_its_calls(
    fleet: Any, collector: Collector
) -> None:
    turn_id = await say(fleet, "traced", "add please")
    (turn,) = await collector.named(TURN, turn_id=turn_id)
    for method in ("remember", "look_up"):
        (ran,) = await collector.named(f"run tests.probe.{method}")
        (called,) = await collector.named(f"execute_tool tests.probe.{method}")
        assert collector.path(ran) == [
            TURN,
            "round",
            "sandbox.run",
            f"execute_tool tests.probe.{method}",
            "publish",
            f"run tests.probe.{method}",
        ]
        assert ran["nekro.call_id"] == called["nekro.call_id"] == called["gen_ai.tool.call.id"]
        assert ran["role"] == "methods" and called["role"] == "rounds"
        assert called["nekro.lane"] == ran["role"] and ran["nekro.outcome"] == "ok"
    rounds = await collector.named("round", 2, turn_id=turn_id)
    asked = [span for span in collector.of_trace(turn["trace"]) if span["name"] == "chat scripted"]
    assert [collector.path(span) for span in asked] == [[TURN, "round", "chat scripted"]] * 2
    assert {span["trace"] for span in (turn, *rounds, *asked)} == {trace_of(turn_id)}
    assert turn["parent"] == b"" and turn["nekro.rounds"] == 2 and not turn["failed"]
    assert turn["begin"] <= min(span["begin"] for span in rounds)
    assert turn["nekro.prompt_tokens"] == sum(span["gen_ai.usage.input_tokens"] for span in asked)
    assert {span["service"] for span in collector.spans} == {"nekro-workers"}


async def test_spans_have_the_attributes_of_the_conventions(fleet: Any, collector: Collector) -> None:
    (turn,) = await collector.named(TURN, turn_id=await say(fleet, "conventional", "add please"))
    spans = {span["name"]: span for span in collector.of_trace(turn["trace"])}
    assert {name: value for name, value in turn.items() if name.startswith("gen_ai.")} == {
        "gen_ai.operation.name": "invoke_agent",
        "gen_ai.provider.name": "nekro",
        "gen_ai.agent.name": "nekro",
        "gen_ai.conversation.id": "conventional",
    }
    asked = spans["chat scripted"]
    assert asked["kind"] == 3  # client
    assert {name for name in asked if name.startswith("gen_ai.")} == {
        "gen_ai.operation.name",
        "gen_ai.provider.name",
        "gen_ai.request.model",
        "gen_ai.response.model",
        "gen_ai.response.finish_reasons",
        "gen_ai.conversation.id",
        "gen_ai.usage.input_tokens",
        "gen_ai.usage.output_tokens",
    }
    assert asked["gen_ai.response.finish_reasons"] == ["stop"]
    tool = spans["execute_tool tests.probe.look_up"]
    assert {name: value for name, value in tool.items() if name.startswith("gen_ai.")} == {
        "gen_ai.operation.name": "execute_tool",
        "gen_ai.tool.name": "tests.probe.look_up",
        "gen_ai.tool.type": "function",
        "gen_ai.tool.call.id": tool["nekro.call_id"],
    }


async def test_workers_count_turns_model_requests_tokens_and_tools(
    fleet: Any, collector: Collector, metrics_port: int
) -> None:
    await collector.named(TURN, turn_id=await say(fleet, "counted", "add please"))
    found: dict[str, float] = {}
    headers = {"Authorization": f"Bearer {monitoring_key(fleet.settings.data_dir)[1]}"}
    async with httpx.AsyncClient(headers=headers, timeout=WAIT_SECONDS) as client:
        for port in range(metrics_port, metrics_port + 3):
            text = (await client.get(f"http://127.0.0.1:{port}/metrics")).text
            for family in text_string_to_metric_families(text):
                for sample in family.samples:
                    name = sample.labels.get("gen_ai_tool_name") or sample.labels.get("gen_ai_token_type")
                    key = f"{sample.name} {name or ''}".strip()
                    found[key] = found.get(key, 0) + sample.value
    tokens = "gen_ai_client_token_usage_sum"
    assert found["gen_ai_invoke_agent_duration_seconds_count"] >= 1
    assert found["gen_ai_client_operation_duration_seconds_count"] >= 2
    assert found[f"{tokens} input"] > found[f"{tokens} output"] > 0
    assert found["gen_ai_execute_tool_duration_seconds_count tests.probe.look_up"] >= 1


async def test_a_call_that_is_approved_later_and_the_round_that_it_wakes_are_in_its_trace(
    fleet: Any, collector: Collector
) -> None:
    turn_id = await say(fleet, "approving", "ask please")
    await collector.named(TURN, turn_id=turn_id)
    async with services_of(fleet) as services:
        async with services.database.read() as transaction:
            (asked,) = await transaction.approvals.newest(
                limit=2, chat_key="approving", state=ApprovalState.PENDING
            )
        await services.approval_decisions.approve(asked.id, by="shell:root")
    (woken,) = await collector.named(TURN, root_turn_id=turn_id)
    (ran,) = await collector.named("run tests.probe.write_text")
    assert collector.path(ran) == [
        TURN, "round", "sandbox.run", "execute_tool tests.probe.write_text", "run tests.probe.write_text",
    ]  # fmt: skip
    assert woken["trace"] == ran["trace"] == trace_of(turn_id)
    assert woken["nekro.turn_id"] != turn_id and collector.path(woken) == [TURN, TURN]
    (later,) = await collector.named("round", turn_id=woken["nekro.turn_id"])
    assert collector.path(later) == [TURN, TURN, "round"]


@pytest.mark.parametrize("kind", ["carry", "lose"])
async def test_a_job_and_the_round_that_it_wakes_are_in_the_trace_of_the_turn_that_started_it(
    fleet: Any, collector: Collector, kind: str
) -> None:
    turn_id = await say(fleet, f"job-{kind}", f"{kind} please")
    (woken,) = await collector.named(TURN, root_turn_id=turn_id)
    (job,) = await collector.named(f"job tests.courier.{kind}")
    assert collector.path(job) == [TURN, f"job tests.courier.{kind}"]
    assert job["trace"] == woken["trace"] == trace_of(turn_id)
    assert job["role"] == "long" and job["failed"] == (kind == "lose")
    (later,) = await collector.named("round", turn_id=woken["nekro.turn_id"])
    assert collector.path(later) == [TURN, TURN, "round"]


async def test_a_merged_turn_and_the_turn_that_answers_it_are_linked(
    fleet: Any, collector: Collector
) -> None:
    (rounds,) = [worker for worker in fleet.workers if worker.lane == "rounds"]
    rounds.freeze()
    try:
        first, second = await say(fleet, "merging", "one"), await say(fleet, "merging", "two")
    finally:
        rounds.thaw()
    (taker,), (merged,) = [await collector.named(TURN, turn_id=turn) for turn in (first, second)]
    (answered,) = await collector.named("round", turn_id=first)
    assert merged["trace"] == trace_of(second) and merged["nekro.merged_into"] == first
    assert merged["links"] == [(taker["trace"], taker["id"])]
    assert answered["links"] == [(merged["trace"], merged["id"])]


async def test_a_posted_message_links_its_request_with_the_turn_which_names_its_trace(
    fleet: Any, collector: Collector
) -> None:
    client_trace, parent = os.urandom(16).hex(), os.urandom(8).hex()
    headers = {"traceparent": f"00-{client_trace}-{parent}-01"}
    with GatewayProcess(fleet) as gateway:
        async with httpx.AsyncClient(
            base_url=gateway.url, headers=gateway.headers, timeout=WAIT_SECONDS
        ) as client:
            posted = await client.post(
                "/api/v1/chats/posted/messages?wait=60",
                json={"text": "hello", "user_id": "u1"},
                headers=headers,
            )
            assert posted.status_code == 200, posted.text
            turn_id = posted.json()["turn_id"]
            told = (await client.get(f"/api/v1/turns/{turn_id}")).json()
    trace = trace_of(turn_id).hex()
    assert told["trace_id"] == trace
    assert told["trace_url"] == f"https://traces.example/t/{trace}?tab=1"
    (turn,) = await collector.named(TURN, turn_id=turn_id)
    (begun,) = await collector.named("turn.requested", turn_id=turn_id)

    def of_client() -> list[dict[str, Any]]:
        return collector.of_trace(bytes.fromhex(client_trace))

    (request,) = await eventually(of_client, what="the request's span")
    assert request["name"] == "http.request" and request["links"] == [(turn["trace"], turn["id"])]
    assert collector.path(begun) == [TURN, "turn.requested"]
    assert begun["links"] == [(request["trace"], request["id"])]


async def test_a_request_continues_the_trace_of_its_client_into_worker_and_log(
    fleet: Any, collector: Collector
) -> None:
    trace, parent = os.urandom(16).hex(), os.urandom(8).hex()
    headers = {
        "traceparent": f"00-{trace}-{parent}-01",
        "tracestate": "vendor=1",
        "X-Request-Id": f"r-{trace}",
    }
    with GatewayProcess(fleet) as gateway:
        body = {"method": "look_up", "args": ["x"], "chat_key": "traced"}
        async with httpx.AsyncClient(
            base_url=gateway.url, headers=gateway.headers, timeout=WAIT_SECONDS
        ) as client:
            assert (await client.post("/api/v1/calls", json=body, headers=headers)).status_code == 200
            broken = {"traceparent": f"00-{'0' * 32}-{parent}-01"}
            assert (await client.get("/api/v1/methods", headers=broken)).status_code == 200

    def of_trace() -> dict[str, Any]:
        return {span["name"]: span for span in collector.spans if span["trace"].hex() == trace}

    spans = await eventually(
        lambda: of_trace() if "run tests.probe.look_up" in of_trace() else None, what="the worker's span"
    )
    request = spans["http.request"]
    assert request["parent"].hex() == parent and request["nekro.request_id"] == f"r-{trace}"
    assert request["nekro.route"] == "/api/v1/calls"
    assert collector.path(spans["run tests.probe.look_up"])[0] == "http.request"
    lines = gateway.log.read_text().splitlines()
    (line,) = [line for line in lines if "/api/v1/calls" in line]
    assert trace in line and f"r-{trace}" in line
    # A trace id that is not valid is replaced by a new one.
    (line,) = [line for line in lines if "/api/v1/methods" in line]
    assert re.search("trace_id[^0-9a-f]+[0-9a-f]{32}", line) and "0" * 32 not in line


async def test_failures_are_recorded_by_their_class_and_no_span_contains_a_text(
    fleet: Any, collector: Collector
) -> None:
    turn_id = await say(fleet, "failing", "fail please")
    await collector.named(TURN, turn_id=turn_id)
    (ran,) = await collector.named("run tests.probe.fail_with")
    (called,) = await collector.named("execute_tool tests.probe.fail_with")
    assert ran["failed"] and ran["nekro.outcome"] == "method_failed"
    assert called["failed"] and called["error.type"] == "MethodFailedError"
    raw = b"".join(collector.raw)
    # Arguments, messages of people, answers of the model.
    assert not [text for text in (SECRET, "fail please", "_ck, 'done'") if text.encode() in raw]
