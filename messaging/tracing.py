"""OpenTelemetry traces: one call is one trace, from the bridge through the queue to its worker.

Tracing is off unless ``NEKRO_TRACING__ENABLED`` is set, which needs the extra ``otel``; while it is off,
a span is one shared object that does nothing, and no library is imported. OpenTelemetry's own variables
(``OTEL_EXPORTER_OTLP_ENDPOINT``, ``OTEL_TRACES_SAMPLER``, …) configure the exporter.

Attributes are names and ids only. Data of users, models and plugins is excluded: arguments, results,
texts, and the messages of exceptions, of which only the type is recorded.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import Token
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Protocol, Self

from broker_config.settings import TracingSettings
from nekro_agent.durations import CLOSE_STEP_SECONDS
from nekro_agent.errors import SettingsError

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import SpanKind, Tracer

__all__ = ["Span", "span", "start_tracing", "stop_tracing", "trace_headers", "traced"]

#: Headers of W3C Trace Context; sent together with Celery's own headers.
HEADERS: Final = ("traceparent", "tracestate")
_EXPORTER_VARIABLE: Final = "OTEL_TRACES_EXPORTER"


class Span(Protocol):
    """A span of a trace, as a context manager: ``with span(…) as part:``."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None: ...

    def tell(self, **attributes: str | int | float | bool | None) -> None:
        """Add attributes with the prefix ``nekro.``; None is omitted."""
        ...

    def fail(self, error_type: str) -> None:
        """Mark the span as failed."""
        ...


class _Nothing:
    """Replaces every span while tracing is off."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def tell(self, **attributes: object) -> None:
        pass

    def fail(self, error_type: str) -> None:
        pass


class _Part:
    """A span that is the current one between ``__enter__`` and ``__exit__``."""

    def __init__(
        self, tracer: Tracer, name: str, kind: SpanKind, parent: Context | None, attributes: Mapping[str, Any]
    ) -> None:
        self._tracer, self._name, self._kind, self._parent = tracer, name, kind, parent
        self._attributes = _named(attributes)
        self._token: Token[Context] | None = None

    def __enter__(self) -> Self:
        from opentelemetry import context, trace

        self._span = self._tracer.start_span(
            self._name, self._parent, self._kind, self._attributes, record_exception=False
        )
        self._token = context.attach(trace.set_span_in_context(self._span, self._parent))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        from opentelemetry import context

        if kind is not None:
            self.fail(kind.__name__)
        if self._token is not None:
            context.detach(self._token)
        self._span.end()

    def tell(self, **attributes: str | int | float | bool | None) -> None:
        self._span.set_attributes(_named(attributes))

    def fail(self, error_type: str) -> None:
        from opentelemetry.trace import StatusCode

        self._span.set_attribute("error.type", error_type)
        self._span.set_status(StatusCode.ERROR, error_type)


_NOTHING: Final = _Nothing()
_tracer: Tracer | None = None
_provider: TracerProvider | None = None


def span(
    name: str,
    attributes: Mapping[str, str | int | float | bool | None],
    *,
    kind: str = "internal",
    headers: Mapping[str, Any] | None = None,
) -> Span:
    """Create a span of the current trace, or of the trace in a message's headers.

    Args:
        attributes: recorded with the prefix ``nekro.``; ids and names only.
        kind: ``internal``, ``producer``, ``consumer`` or ``client``, as OpenTelemetry defines them.
        headers: headers of a received message; None continues the current trace.
    """
    if _tracer is None:
        return _NOTHING
    from opentelemetry.trace import SpanKind

    parent = None if headers is None else _context_of(headers)
    return _Part(_tracer, name, SpanKind[kind.upper()], parent, attributes)


def trace_headers() -> dict[str, str]:
    """Return the trace headers for an outgoing message; empty while tracing is off."""
    if _tracer is None:
        return {}
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    headers: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(headers)
    return headers


def start_tracing(settings: TracingSettings, *, role: str, node: str) -> None:
    """Turn tracing on if it is enabled in the settings; idempotent.

    Raises:
        SettingsError: the extra is not installed, or the configured exporter is not supported.
    """
    global _tracer, _provider
    if not settings.enabled or _tracer is not None:
        return
    try:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

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
    _provider = TracerProvider(
        resource=Resource.create(resource if named else {"service.name": "nekro-workers", **resource}),
        shutdown_on_exit=False,
    )
    if exporter is not None:
        _provider.add_span_processor(BatchSpanProcessor(exporter))
    _tracer = _provider.get_tracer("nekro-workers")


def stop_tracing() -> None:
    """Send collected spans and turn tracing off; waits at most ``CLOSE_STEP_SECONDS`` for the collector."""
    global _tracer, _provider
    provider, _provider, _tracer = _provider, None, None
    if provider is not None:
        # The exporter retries until its own time limit, which cannot be shortened.
        ending = threading.Thread(target=provider.shutdown, name="nekro-traces", daemon=True)
        ending.start()
        ending.join(CLOSE_STEP_SECONDS)


@contextmanager
def traced(settings: TracingSettings, *, role: str, node: str) -> Iterator[None]:
    """Trace for the duration of the block, if tracing is enabled in the settings."""
    start_tracing(settings, role=role, node=node)
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


def _context_of(headers: Mapping[str, Any]) -> Context:
    """Return the trace of a message; a new one if its headers contain none or an invalid one."""
    from opentelemetry.context import Context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    texts = {name: value for name in HEADERS if isinstance(value := headers.get(name), str)}
    return TraceContextTextMapPropagator().extract(texts, Context())


def _named(attributes: Mapping[str, Any]) -> dict[str, Any]:
    return {f"nekro.{name}": value for name, value in attributes.items() if value is not None}
