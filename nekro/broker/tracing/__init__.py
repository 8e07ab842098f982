"""OpenTelemetry traces: a turn is one trace, from its first round through queues and workers to its last.

Tracing is off unless ``NEKRO_TRACING__ENABLED`` is set, which needs the extra ``otel``; while it is off,
a span is one shared object that does nothing, and no library is imported. OpenTelemetry's own variables
(``OTEL_EXPORTER_OTLP_ENDPOINT``, ``OTEL_TRACES_SAMPLER``, …) configure the exporter.

Names and attributes of turns, model requests and calls are those of OpenTelemetry's conventions for
generative AI (``genai``). By default attributes are names, ids and figures only. Texts of users, models and
plugins are recorded only if ``NEKRO_TRACING__CAPTURE_CONTENT`` is set, without secrets (``content``). The
messages of exceptions are never recorded, only their types.
"""

from __future__ import annotations

from nekro.broker.tracing.process import (
    begin_turn,
    end_turn,
    is_tracing,
    recorded_trace_id,
    span,
    start_tracing,
    stop_tracing,
    trace_headers,
    traced,
)
from nekro.broker.tracing.spans import Span, TurnTrace

__all__ = [
    "Span",
    "TurnTrace",
    "begin_turn",
    "end_turn",
    "is_tracing",
    "recorded_trace_id",
    "span",
    "start_tracing",
    "stop_tracing",
    "trace_headers",
    "traced",
]
