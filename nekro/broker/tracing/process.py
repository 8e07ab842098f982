"""Tracing of this process: switched on and off once, used from everywhere."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final

from broker_config.settings import TracingSettings
from nekro.broker.tracing import genai
from nekro.broker.tracing.genai import captures_content
from nekro.broker.tracing.spans import (
    NOTHING,
    Span,
    Tracing,
    TurnTrace,
    Value,
    chosen_ids,
    known,
    named,
    random_or_chosen_ids,
)
from nekro_agent.durations import CLOSE_STEP_SECONDS
from nekro_agent.errors import SettingsError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

__all__ = [
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

_EXPORTER_VARIABLE: Final = "OTEL_TRACES_EXPORTER"

_tracing: Tracing | None = None


def is_tracing() -> bool:
    """Whether tracing is on in this process; for values that are expensive to determine."""
    return _tracing is not None


def span(
    name: str,
    ids: Mapping[str, str | int | float | bool | None],
    *,
    kind: str = "internal",
    headers: Mapping[str, Any] | None = None,
    turn: TurnTrace | None = None,
    links: Sequence[TurnTrace] = (),
    standard: Mapping[str, Value] | None = None,
) -> Span:
    """Create a span of the current trace, of the trace in a message's headers, or of a turn's trace.

    Args:
        ids: recorded with the prefix ``nekro.``; ids and names only.
        kind: ``internal``, ``producer``, ``consumer``, ``server`` or ``client``, as in OpenTelemetry.
        headers: headers of a received message, whose trace is continued; None continues the current trace.
        turn: the turn below whose span this one is; None as above.
        links: turns that it belongs to besides.
        standard: attributes with names of OpenTelemetry's conventions; None is omitted.
    """
    if _tracing is None:
        return NOTHING
    return _tracing.span(name, ids, kind=kind, headers=headers, turn=turn, links=links, standard=standard)


def begin_turn(turn: TurnTrace) -> None:
    """Link the current span, such as an HTTP request, and the new turn that it causes with each other.

    Without a current span nothing is recorded.
    """
    if _tracing is None:
        return
    from opentelemetry import trace

    current = trace.get_current_span()
    here = current.get_span_context()
    if not here.is_valid or here.trace_id == turn.trace_id:
        return
    current.add_link(_tracing.span_context(turn), {"nekro.turn_id": turn.turn_id})
    ids = {"turn_id": turn.turn_id, "root_turn_id": turn.root_turn_id}
    _tracing.tracer.start_span(
        "turn.requested", _tracing.context(turn), trace.SpanKind.PRODUCER, named(ids), [trace.Link(here)]
    ).end()


def end_turn(
    turn: TurnTrace,
    *,
    started_at: datetime,
    ended_at: datetime,
    ids: Mapping[str, str | int | float | bool | None],
    standard: Mapping[str, Value],
    error_type: str | None = None,
    links: Sequence[TurnTrace] = (),
) -> None:
    """Record the span of a whole turn, which has just ended; call it once per turn.

    Args:
        ids, standard, links: see ``span``.
        error_type: code of the error of a failed turn; None if it did not fail.
    """
    if _tracing is None:
        return
    from opentelemetry.context import Context
    from opentelemetry.trace import SpanKind, StatusCode

    with chosen_ids(turn):
        whole = _tracing.tracer.start_span(
            f"{genai.INVOKE_AGENT} {genai.NEKRO}",
            Context() if turn.is_root else _tracing.context(turn.root),
            SpanKind.INTERNAL,
            {**named(ids), **known(standard)},
            [_tracing.link(other) for other in links],
            start_time=_nanoseconds(started_at),
        )
    if error_type is not None:
        whole.set_attribute("error.type", error_type)
        whole.set_status(StatusCode.ERROR, error_type)
    whole.end(_nanoseconds(ended_at))


def recorded_trace_id(turn: TurnTrace) -> str | None:
    """Return the id of a turn's trace in hexadecimal; None while tracing is off and if it is not sampled."""
    if _tracing is None or not _tracing.span_context(turn).trace_flags.sampled:
        return None
    return f"{turn.trace_id:032x}"


def trace_headers() -> dict[str, str]:
    """Return the trace headers for an outgoing message; empty while tracing is off."""
    if _tracing is None:
        return {}
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    headers: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(headers)
    return headers


def start_tracing(
    settings: TracingSettings, *, role: str, node: str, redact: Callable[[str], str] | None = None
) -> None:
    """Turn tracing on if it is enabled in the settings; idempotent.

    Args:
        redact: removes secrets from contents; None: this process captures none, whatever the settings say.

    Raises:
        SettingsError: the extra is not installed, or the configured exporter is not supported.
    """
    global _tracing
    if not settings.enabled or _tracing is not None:
        return
    try:
        from opentelemetry import trace
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.sampling import ParentBased

        exporter = _exporter(os.environ.get(_EXPORTER_VARIABLE, "otlp"))
    except ImportError as exc:
        raise SettingsError(
            f"NEKRO_TRACING__ENABLED: {exc.name or 'opentelemetry'} is not installed; "
            "`pip install 'nekro-workers[otel]'`, or unset it"
        ) from exc
    named = "OTEL_SERVICE_NAME" in os.environ or "service.name=" in os.environ.get(
        "OTEL_RESOURCE_ATTRIBUTES", ""
    )
    resource = {"service.instance.id": node, "nekro.role": role}
    provider = TracerProvider(
        resource=Resource.create(resource if named else {"service.name": "nekro-workers", **resource}),
        shutdown_on_exit=False,
        id_generator=random_or_chosen_ids(),
    )
    if exporter is not None:
        provider.add_span_processor(BatchSpanProcessor(exporter))
    _tracing = Tracing(
        provider=provider,
        tracer=provider.get_tracer("nekro-workers"),
        follows_parent=isinstance(provider.sampler, ParentBased),
        redact=redact if captures_content(settings) else None,
        current_span=trace.get_current_span,
    )


def stop_tracing() -> None:
    """Send collected spans and turn tracing off; waits at most ``CLOSE_STEP_SECONDS`` for the collector."""
    global _tracing
    tracing, _tracing = _tracing, None
    if tracing is not None:
        # The exporter retries until its own time limit, which cannot be shortened.
        ending = threading.Thread(target=tracing.provider.shutdown, name="nekro-traces", daemon=True)
        ending.start()
        ending.join(CLOSE_STEP_SECONDS)


@contextmanager
def traced(
    settings: TracingSettings, *, role: str, node: str, redact: Callable[[str], str] | None = None
) -> Iterator[None]:
    """Trace for the duration of the block, if tracing is enabled in the settings; see ``start_tracing``."""
    start_tracing(settings, role=role, node=node, redact=redact)
    try:
        yield
    finally:
        stop_tracing()


def _exporter(name: str) -> SpanExporter | None:
    if name == "none":
        return None
    if name == "console":
        from opentelemetry.sdk.trace.export import ConsoleSpanExporter

        return ConsoleSpanExporter()
    if name == "otlp":
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        return OTLPSpanExporter()
    raise SettingsError(f"{_EXPORTER_VARIABLE}: {name!r} is not supported; use otlp, console or none")


def _nanoseconds(moment: datetime) -> int:
    return int(moment.timestamp() * 1_000_000) * 1000
