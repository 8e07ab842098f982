"""One call is one trace: spans of two workers, received by a collector on loopback."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from gateway_process import GatewayProcess
from waiting import WAIT_SECONDS, eventually

SECRET = "open-sesame"
SCRIPT = [
    {"when": "fail please", "answer": f"```python\nfail_with('{SECRET}')\n```"},
    {"when": "add please", "answer": f"```python\nremember('{SECRET}')\nlook_up('{SECRET}')\n```"},
    {"when": ".", "answer": "```python\nsend_msg_text(_ck, 'done')\n```"},
]


class Collector:
    """Receives OTLP over HTTP, as an OpenTelemetry collector does."""

    def __init__(self) -> None:
        self.spans: list[dict[str, Any]] = []
        self.raw: list[bytes] = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                collector.take(self.path, self.rfile.read(int(self.headers["Content-Length"])))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def take(self, path: str, body: bytes) -> None:
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        assert path == "/v1/traces"
        self.raw.append(body)
        for group in ExportTraceServiceRequest.FromString(body).resource_spans:
            resource = {item.key: item.value.string_value for item in group.resource.attributes}
            for span in (span for scope in group.scope_spans for span in scope.spans):
                attributes = {item.key: item.value.string_value for item in span.attributes}
                self.spans.append(
                    {
                        "name": span.name,
                        "id": span.span_id,
                        "parent": span.parent_span_id,
                        "trace": span.trace_id,
                        "failed": span.status.code == 2,
                        "role": resource["nekro.role"],
                        "service": resource["service.name"],
                        **attributes,
                    }
                )

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    async def named(self, name: str, count: int = 1) -> list[dict[str, Any]]:
        """Spans with a name, once there are enough."""

        def enough() -> list[dict[str, Any]]:
            found = [span for span in self.spans if span["name"] == name]
            return found if len(found) >= count else []

        found: list[dict[str, Any]] = await eventually(enough, what=f"{count} spans {name}")
        return found

    def road(self, span: dict[str, Any]) -> list[str]:
        """Names from the root of a span's trace to the span."""
        by_id = {other["id"]: other for other in self.spans}
        parent = by_id.get(span["parent"])
        return [*(self.road(parent) if parent else []), span["name"]]


@pytest.fixture(scope="module")
def database_url(tmp_path_factory: pytest.TempPathFactory) -> str:
    """One kind of database suffices here."""
    return f"sqlite:///{tmp_path_factory.mktemp('db') / 'nekro.db'}"


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    collector = Collector()
    yield collector
    collector.close()


@pytest.fixture(scope="module")
def fleet(
    make_fleet: Callable[..., Any], collector: Collector, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Any]:
    script: Path = tmp_path_factory.mktemp("llm") / "script.yaml"
    script.write_text(yaml.safe_dump(SCRIPT))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
        system = make_fleet(llm={"script": script}, tracing={"enabled": True}, agent={"debounce_seconds": 0})
        system.start("methods", "rounds")
        yield system
        system.stop()  # stops before the collector


async def say(fleet: Any, chat_key: str, text: str) -> None:
    services = fleet.services()
    await services.start()
    try:
        await services.receive_message(chat_key, text, user_id="u1", user_name="Ada")
    finally:
        await services.close()


async def test_a_call_of_a_round_is_one_trace_from_the_round_to_the_worker(
    fleet: Any, collector: Collector
) -> None:
    await say(fleet, "traced", "add please")
    for method in ("remember", "look_up"):
        (ran,) = await collector.named(f"run tests.probe.{method}")
        (called,) = await collector.named(f"call tests.probe.{method}")
        await collector.named("round", 2)
        assert collector.road(ran) == [
            "round",
            "sandbox.run",
            f"call tests.probe.{method}",
            "publish",
            f"run tests.probe.{method}",
        ]
        assert ran["nekro.call_id"] == called["nekro.call_id"]
        assert ran["role"] == "methods" and called["role"] == "rounds"
        assert called["nekro.lane"] == ran["role"] and ran["nekro.outcome"] == "ok"
    (first, second) = await collector.named("round", 2)
    assert first["nekro.turn_id"] == second["nekro.turn_id"]
    (asked, _) = await collector.named("llm.request", 2)
    assert collector.road(asked) == ["round", "llm.request"] and asked["nekro.model"] == "scripted"
    assert {span["service"] for span in collector.spans} == {"nekro-workers"}


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
        async with httpx.AsyncClient(base_url=gateway.url, timeout=WAIT_SECONDS) as client:
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
    assert collector.road(spans["run tests.probe.look_up"])[0] == "http.request"
    lines = gateway.log.read_text().splitlines()
    (line,) = [line for line in lines if "/api/v1/calls" in line]
    assert trace in line and f"r-{trace}" in line
    # A trace id that is not valid is replaced by a new one.
    (line,) = [line for line in lines if "/api/v1/methods" in line]
    assert re.search("trace_id[^0-9a-f]+[0-9a-f]{32}", line) and "0" * 32 not in line


async def test_failures_are_recorded_by_their_class_and_no_span_contains_arguments(
    fleet: Any, collector: Collector
) -> None:
    await say(fleet, "failing", "fail please")
    (ran,) = await collector.named("run tests.probe.fail_with")
    (called,) = await collector.named("call tests.probe.fail_with")
    assert ran["failed"] and ran["nekro.outcome"] == "method_failed"
    assert called["failed"] and called["error.type"] == "MethodFailedError"
    assert SECRET.encode() not in b"".join(collector.raw)
