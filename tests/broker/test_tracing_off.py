"""Disabled tracing imports nothing, and invalid tracing settings are refused."""

from __future__ import annotations

import subprocess
import sys

import pytest

from broker_config.settings import TracingSettings
from nekro.broker import tracing
from nekro_agent.errors import SettingsError

OFF = """
import sys
from nekro.broker import tracing
from broker_config.settings import TracingSettings
with tracing.traced(TracingSettings(), role="methods", node="n"):
    with tracing.span("call", {"method": "a.b.c"}, kind="client") as part:
        part.set_attributes(outcome="ok")
        part.fail("ValueError")
        assert tracing.trace_headers() == {}
assert tracing.span("a", {}) is tracing.span("b", {})
assert not [name for name in sys.modules if name.startswith("opentelemetry")]
"""


def test_disabled_tracing_imports_nothing() -> None:
    done = subprocess.run([sys.executable, "-c", OFF], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_an_unknown_exporter_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "zipkin")
    with pytest.raises(SettingsError, match="zipkin"):
        tracing.start_tracing(TracingSettings(enabled=True), role="cli", node="n")


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(SettingsError, match=r"pip install 'nekro-workers\[otel\]'"):
        tracing.start_tracing(TracingSettings(enabled=True), role="cli", node="n")


@pytest.mark.parametrize("headers", [{}, {"traceparent": 7}, {"traceparent": "nonsense"}, {"tracestate": []}])
def test_headers_without_a_trace_start_a_new_one(
    headers: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "none")
    with (
        tracing.traced(TracingSettings(enabled=True), role="cli", node="n"),
        tracing.span("run", {}, kind="consumer", headers=headers),
    ):
        inner = tracing.trace_headers()
    assert set(inner) == {"traceparent"} and not inner["traceparent"].startswith("00-" + "0" * 32)


def test_a_span_continues_the_trace_of_its_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "none")
    with tracing.traced(TracingSettings(enabled=True), role="cli", node="n"):
        with tracing.span("publish", {}, kind="producer"):
            sent = tracing.trace_headers()
        with tracing.span("run", {}, kind="consumer", headers=sent):
            continued = tracing.trace_headers()
    assert sent["traceparent"].split("-")[1] == continued["traceparent"].split("-")[1]
