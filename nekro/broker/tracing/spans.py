"""Spans, the ids of a turn's trace, and the connection to OpenTelemetry that creates them.

Every process derives the ids of a turn's trace from the turn's id.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar, Token
from dataclasses import dataclass
from hashlib import sha256
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self

from nekro.broker.tracing import genai
from nekro.broker.tracing.genai import content_text

if TYPE_CHECKING:
    from opentelemetry import trace
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.id_generator import IdGenerator
    from opentelemetry.trace import Link, SpanContext, Tracer

__all__ = [
    "NOTHING",
    "Span",
    "Tracing",
    "TurnTrace",
    "Value",
    "chosen_ids",
    "known",
    "named",
    "random_or_chosen_ids",
]


@dataclass(frozen=True, kw_only=True)
class TurnTrace:
    """A turn in a trace.

    The ids are hashes and not the turn's id itself: samplers take the last 64 bits of a trace id for a random
    number, and in those of a UUID two bits are constant.
    """

    turn_id: str
    #: The turn whose work caused this one, by an approved or detached call or a job; both are in its trace.
    #: The turn itself if there is none.
    root_turn_id: str

    @property
    def trace_id(self) -> int:
        """Id of the trace, 128 bits."""
        return _number(f"trace {self.root_turn_id}", 16)

    @property
    def span_id(self) -> int:
        """Id of the span of the whole turn, 64 bits."""
        return _number(f"turn {self.turn_id}", 8)

    @property
    def root(self) -> TurnTrace:
        """The turn that began the trace."""
        return TurnTrace(turn_id=self.root_turn_id, root_turn_id=self.root_turn_id)

    @property
    def is_root(self) -> bool:
        """Whether the turn began the trace."""
        return self.turn_id == self.root_turn_id


def _number(text: str, size: int) -> int:
    # Zero is not a valid id.
    return int.from_bytes(sha256(f"nekro {text}".encode()).digest()[:size]) or 1


#: Headers of W3C Trace Context; sent together with Celery's own headers.
HEADERS: Final = ("traceparent", "tracestate")
#: The turn whose root span starts next. Its ids derive from the turn id.
_chosen: Final[ContextVar[TurnTrace | None]] = ContextVar("nekro_chosen_ids", default=None)

#: The bit of the trace flags that says that a trace is sampled.
_SAMPLED: Final = 1

Value = str | int | float | bool | Sequence[str] | None


class Span:
    """A span of a trace, as a context manager: ``with span(…) as part:``.

    This one records nothing: it stands for every span while tracing is off, and for spans of traces that are
    not sampled.
    """

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        pass

    def set_attributes(self, **attributes: str | int | float | bool | None) -> None:
        """Add attributes with the prefix ``nekro.``; None is omitted."""

    def put(self, attributes: Mapping[str, Value]) -> None:
        """Add attributes with names of OpenTelemetry's conventions; None is omitted."""

    def content(self, name: str, make: Callable[[], object]) -> None:
        """Add JSON data with texts of users, models or plugins, if such contents are captured.

        Args:
            make: returns the data; called only if it is recorded.
        """

    def fail(self, error_type: str) -> None:
        """Mark the span as failed."""


class _Unsampled(Span):
    """The first span of this process in a trace that is not sampled: messages from it pass that on."""

    def __init__(self, parent: Context) -> None:
        self._parent = parent

    def __enter__(self) -> Self:
        from opentelemetry import context

        self._token = context.attach(self._parent)
        return self

    def __exit__(self, *_: object) -> None:
        from opentelemetry import context

        context.detach(self._token)


class _RecordedSpan(Span):
    """A span that is the current one between ``__enter__`` and ``__exit__``."""

    def __init__(
        self,
        tracing: Tracing,
        name: str,
        kind: str,
        parent: Context | None,
        attributes: dict[str, Any],
        links: Sequence[TurnTrace],
    ) -> None:
        self._tracing, self._name, self._kind, self._parent = tracing, name, kind, parent
        self._attributes, self._links = attributes, links
        self._token: Token[Context] | None = None
        self._has_failed = False

    def __enter__(self) -> Self:
        from opentelemetry import context, trace

        self._span = self._tracing.tracer.start_span(
            self._name,
            self._parent,
            trace.SpanKind[self._kind.upper()],
            self._attributes,
            [self._tracing.link(turn) for turn in self._links],
            record_exception=False,
        )
        self._token = context.attach(trace.set_span_in_context(self._span, self._parent))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        from opentelemetry import context

        if kind is not None and not self._has_failed:  # the block may have named the error better
            self.fail(kind.__name__)
        if self._token is not None:
            context.detach(self._token)
        self._span.end()

    def set_attributes(self, **attributes: str | int | float | bool | None) -> None:
        self._span.set_attributes(named(attributes))

    def put(self, attributes: Mapping[str, Value]) -> None:
        self._span.set_attributes(known(attributes))

    def content(self, name: str, make: Callable[[], object]) -> None:
        redact = self._tracing.redact
        if redact is not None and self._span.is_recording():
            text = content_text(make(), redact)
            if text is not None:
                self._span.set_attribute(name, text)

    def fail(self, error_type: str) -> None:
        from opentelemetry.trace import StatusCode

        self._has_failed = True
        self._span.set_attribute("error.type", error_type)
        self._span.set_status(StatusCode.ERROR, error_type)


@dataclass(frozen=True, kw_only=True)
class Tracing:
    """This process's connection to OpenTelemetry, while tracing is on."""

    provider: TracerProvider
    tracer: Tracer
    #: Whether a span is recorded exactly if its parent is.
    follows_parent: bool
    #: Removes secrets from contents; None: contents are not captured.
    redact: Callable[[str], str] | None

    #: OpenTelemetry's function of that name.
    current_span: Callable[[Context | None], trace.Span]

    def span(
        self,
        name: str,
        ids: Mapping[str, Any],
        *,
        kind: str,
        headers: Mapping[str, Any] | None,
        turn: TurnTrace | None,
        links: Sequence[TurnTrace],
        standard: Mapping[str, Value] | None,
    ) -> Span:
        """Create a span; see ``nekro.broker.tracing.span``."""
        parent = None
        if turn is not None:
            parent = self.context(turn)
        elif headers is not None:
            parent = _context_of(headers)
        if self.follows_parent:
            above = self.current_span(parent).get_span_context()
            if above.is_valid and not above.trace_flags & _SAMPLED:
                return NOTHING if parent is None else _Unsampled(parent)
        attributes = named(ids)
        if standard is not None:
            attributes.update(known(standard))
        return _RecordedSpan(self, name, kind, parent, attributes, links)

    def span_context(self, turn: TurnTrace) -> SpanContext:
        """Return the place of a turn's own span, which is recorded when the turn has ended.

        Every process finds the same decision of the sampler, which depends on the trace's id only.
        """
        from opentelemetry.context import Context
        from opentelemetry.sdk.trace.sampling import Decision
        from opentelemetry.trace import SpanContext, TraceFlags

        result = self.provider.sampler.should_sample(Context(), turn.trace_id, genai.INVOKE_AGENT)
        is_sampled = result.decision is Decision.RECORD_AND_SAMPLE
        flags = TraceFlags(TraceFlags.SAMPLED if is_sampled else TraceFlags.DEFAULT)
        return SpanContext(turn.trace_id, turn.span_id, is_remote=True, trace_flags=flags)

    def context(self, turn: TurnTrace) -> Context:
        from opentelemetry import trace
        from opentelemetry.context import Context

        return trace.set_span_in_context(trace.NonRecordingSpan(self.span_context(turn)), Context())

    def link(self, turn: TurnTrace) -> Link:
        from opentelemetry.trace import Link

        return Link(self.span_context(turn), {"nekro.turn_id": turn.turn_id})


NOTHING: Final = Span()


@contextmanager
def chosen_ids(turn: TurnTrace) -> Iterator[None]:
    """Give the span that the block starts the ids of a turn's own span."""
    token = _chosen.set(turn)
    try:
        yield
    finally:
        _chosen.reset(token)


def random_or_chosen_ids() -> IdGenerator:
    """Return OpenTelemetry's generator of ids, which follows ``chosen_ids``."""
    from opentelemetry.sdk.trace.id_generator import RandomIdGenerator

    class Ids(RandomIdGenerator):
        def generate_trace_id(self) -> int:
            turn = _chosen.get()
            return super().generate_trace_id() if turn is None else turn.trace_id

        def generate_span_id(self) -> int:
            turn = _chosen.get()
            return super().generate_span_id() if turn is None else turn.span_id

    return Ids()


def _context_of(headers: Mapping[str, Any]) -> Context:
    """Return the trace of a message; a new one if its headers contain none or an invalid one."""
    from opentelemetry.context import Context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    texts = {name: value for name in HEADERS if isinstance(value := headers.get(name), str)}
    return TraceContextTextMapPropagator().extract(texts, Context())


def named(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Return attributes with our prefix, without those that are None."""
    return {f"nekro.{name}": value for name, value in attributes.items() if value is not None}


def known(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Return attributes without those that are None."""
    return {name: value for name, value in attributes.items() if value is not None}
