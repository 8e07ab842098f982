"""The span and the duration of one call of a method, as OpenTelemetry's conventions describe a tool."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Any, Final, Self

from pydantic_core import from_json

from nekro.base.metrics import is_counting, metrics
from nekro.broker.tracing import genai
from nekro.broker.tracing.process import is_tracing, span
from nekro.wire.invocation import Envelope

__all__ = ["ToolSpan", "tool_span"]

#: Longest tagged text that is parsed for a span; of a longer one its length is recorded.
_MOST_BYTES: Final = 64_000


class ToolSpan:
    """Covers a call from its request to its answer, on the side of its caller; a context manager.

    This one observes nothing: it stands for every call while tracing and metrics are off.
    """

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        pass

    def set_attributes(self, **attributes: str | int | float | bool | None) -> None:
        """Add attributes with the prefix ``nekro.``; None is omitted."""

    def arguments(self, text: bytes) -> None:
        """Add the arguments, as tagged text, if contents are captured."""

    def result(self, envelope: Envelope) -> None:
        """Add the result if contents are captured."""

    def fail(self, error_type: str) -> None:
        """Mark the call as failed."""


_UNOBSERVED: Final = ToolSpan()


def tool_span(method: str, *, kind: str, call_id: str, lane: str) -> ToolSpan:
    """Return what observes a call: a shared object that does nothing if tracing and metrics are off.

    Args:
        method: full name, ``author.module.function``.
        kind: its ``SandboxMethodType``.
    """
    return _Observed(method, kind, call_id, lane) if is_tracing() or is_counting() else _UNOBSERVED


class _Observed(ToolSpan):
    def __init__(self, method: str, kind: str, call_id: str, lane: str) -> None:
        self._method = method
        self._error = ""
        ids = {"call_id": call_id, "method": method, "type": kind, "lane": lane}
        standard = {
            genai.OPERATION: genai.EXECUTE_TOOL,
            genai.TOOL_NAME: method,
            genai.TOOL_TYPE: "function",
            genai.TOOL_CALL_ID: call_id,
        }
        self._part = span(f"{genai.EXECUTE_TOOL} {method}", ids, standard=standard)

    def __enter__(self) -> Self:
        self._part.__enter__()
        self._begin = time.monotonic()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is not None:
            self._error = kind.__name__
        if is_counting():
            duration = metrics().gen_ai_tool_seconds.labels(self._method, self._error)
            duration.observe(time.monotonic() - self._begin)
        self._part.__exit__(kind, exc, traceback)

    def set_attributes(self, **attributes: str | int | float | bool | None) -> None:
        self._part.set_attributes(**attributes)

    def arguments(self, text: bytes) -> None:
        self._part.content(genai.ARGUMENTS, lambda: _data(text))

    def result(self, envelope: Envelope) -> None:
        if envelope.value is not None:
            self._part.content(genai.RESULT, lambda: _data(envelope.value_bytes()))
        elif envelope.text is not None:
            self._part.content(genai.RESULT, lambda: envelope.text)

    def fail(self, error_type: str) -> None:
        self._error = error_type
        self._part.fail(error_type)


def _data(text: bytes) -> Any:
    if len(text) <= _MOST_BYTES:
        try:
            return from_json(text, allow_inf_nan=False)
        except ValueError:
            pass
    return {"bytes": len(text)}
