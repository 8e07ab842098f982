"""Spans of this process, kept in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from broker_config.settings import TracingSettings
from nekro.broker import tracing
from nekro.broker.tracing import process

__all__ = ["recorded_spans"]


@contextmanager
def recorded_spans(*, redact: Callable[[str], str] | None = None, **settings: Any) -> Iterator[list[Any]]:
    """Trace during the block; the list has the spans that ended. It needs ``OTEL_TRACES_EXPORTER=none``."""
    from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor

    found: list[Any] = []

    class Keep(SpanProcessor):
        def on_end(self, span: ReadableSpan) -> None:
            found.append(span)

    with tracing.traced(TracingSettings(enabled=True, **settings), role="cli", node="n", redact=redact):
        assert process._tracing is not None
        process._tracing.provider.add_span_processor(Keep())
        yield found
