"""The logger of plugins: loguru, whose level and format the application chooses.

A record is a constant event name and fields: ``logger.bind(call_id=…).info("call_ended")``.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable, Mapping
from contextvars import ContextVar, Token
from datetime import UTC
from typing import TYPE_CHECKING, Any, TextIO

from loguru import logger

if TYPE_CHECKING:
    from loguru import Logger, Record

__all__ = ["begin_fields", "configure", "end_fields", "get_sub_logger", "logger"]

_TEXT_FORMAT = (
    "<green>{time:YYYY-MM-DD HH:mm:ss.SSS}</green> <level>{level: <8}</level> "
    "<cyan>{extra[name]}</cyan> {message}"
)
#: Where the formatters leave what they made for loguru's template; never a field of a record.
_RENDERED = "_rendered"
_fields_here: ContextVar[Mapping[str, str]] = ContextVar("nekro_log_fields", default={})  # noqa: B039 - read only


def configure(
    *,
    level: str = "INFO",
    json_lines: bool = False,
    sink: TextIO | None = None,
    fields: Mapping[str, str] | None = None,
    redact: Callable[[str], str] | None = None,
) -> None:
    """Send all log records to one sink; called once by the application, never at import.

    Args:
        level: lowest level that is written.
        json_lines: one JSON object per line instead of text: ``time`` (UTC), ``level``, ``logger``,
            ``event``, the bound fields, and ``exception`` with the traceback.
        sink: None means standard error.
        fields: bound to every record; text leaves them out, since they are the same on each line.
        redact: takes what must not be written out of a text; sees every line.
    """
    constant = dict(fields or {})
    target = _Redacting(sink if sink is not None else sys.stderr, redact or str)
    logger.remove()
    logger.configure(extra={"name": "nekro", **constant}, patcher=_add_fields)
    form = _json_format(target.redact) if json_lines else _text_format(frozenset(constant))
    # diagnose=False: a traceback must not print the values of variables, secrets among them.
    logger.add(target, level=level, format=form, backtrace=False, diagnose=False)


def begin_fields(fields: Mapping[str, str]) -> Token[Mapping[str, str]]:
    """Add fields to what the running context logs from now on, until ``end_fields``.

    What ``logger.contextualize`` does, without the objects that it holds meanwhile: thousands of
    calls may wait in one process.
    """
    around = _fields_here.get()
    return _fields_here.set({**around, **fields} if around else fields)


def end_fields(token: Token[Mapping[str, str]]) -> None:
    """Undo ``begin_fields``.

    Raises:
        ValueError: this is another context than the one that it was called in.
    """
    _fields_here.reset(token)


def _add_fields(record: Record) -> None:
    for name, value in _fields_here.get().items():
        record["extra"].setdefault(name, value)


def get_sub_logger(name: str, **bind: object) -> Logger:
    """Return a logger whose records carry ``name`` and the fields of ``bind``."""
    return logger.bind(name=name, **bind)


class _Redacting:
    """A text stream that writes nothing it should not."""

    def __init__(self, target: TextIO, redact: Callable[[str], str]) -> None:
        self._target = target
        self.redact = redact

    def write(self, text: str) -> None:
        """Write a whole line, at once: other threads and processes share the stream."""
        self._target.write(self.redact(text))

    def flush(self) -> None:
        """Pass it on."""
        self._target.flush()

    def isatty(self) -> bool:
        """Whether colours are of use."""
        return self._target.isatty()


def _text_format(left_out: frozenset[str]) -> Callable[[Record], str]:
    def form(record: Record) -> str:
        record["extra"][_RENDERED] = "".join(
            f" {name}={value}" for name, value in _fields(record).items() if name not in left_out
        )
        return f"{_TEXT_FORMAT}{{extra[{_RENDERED}]}}\n{{exception}}"

    return form


def _json_format(redact: Callable[[str], str]) -> Callable[[Record], str]:
    def form(record: Record) -> str:
        line: dict[str, Any] = {
            "time": record["time"].astimezone(UTC).isoformat(timespec="milliseconds"),
            "level": record["level"].name,
            "logger": record["extra"]["name"],
            "event": record["message"],
        } | _fields(record)
        error = record["exception"]
        if error is not None:
            line["exception"] = "".join(traceback.format_exception(error.type, error.value, error.traceback))
        # Before the quoting too: a secret with a quote in it is spelled differently afterwards.
        record["extra"][_RENDERED] = json.dumps(_plain(line, redact), ensure_ascii=False)
        return f"{{extra[{_RENDERED}]}}\n"

    return form


def _fields(record: Record) -> dict[str, Any]:
    return {name: value for name, value in record["extra"].items() if name not in ("name", _RENDERED)}


def _plain(value: object, redact: Callable[[str], str]) -> Any:
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, Mapping):
        return {redact(str(name)): _plain(item, redact) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, redact) for item in value]
    return redact(str(value))
