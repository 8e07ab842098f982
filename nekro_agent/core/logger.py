"""The logger of plugins: loguru, with level and format set by the application.

A record is a constant event name and fields: ``logger.bind(call_id=…).info("call_ended")``.

Records quote text of unknown origin: messages of plugins, errors, arguments. They are formatted by the
sink and not by loguru's templates, so a record is one line whatever it contains and however it was logged,
including with ``raw`` and ``colors``. In text form the lines of a traceback follow it, each after four
spaces and a bar; every other line is a record. Messages and values that could be mistaken for fields are
quoted. The use of a name that does not exist here is logged once.
"""

from __future__ import annotations

import json
import logging
import math
import re
import sys
import traceback
from collections.abc import Callable, Collection, Mapping
from contextvars import ContextVar, Token
from datetime import UTC
from typing import TYPE_CHECKING, Any, Final, TextIO

from loguru import logger

from nekro_agent.errors import PlaceholderUsedError
from nekro_agent.tools.visible_text import has_colours, shortened, visible, visible_json

if TYPE_CHECKING:
    from loguru import Logger, Message, Record

__all__ = [
    "StandardLogs",
    "begin_fields",
    "configure",
    "end_fields",
    "get_sub_logger",
    "log_failure",
    "logger",
    "missing_name",
]

#: Most characters of a message, of a field, of a line of a traceback; most lines of a traceback.
MAX_MESSAGE_CHARS: Final = 4000

MAX_FIELD_CHARS: Final = 1000

MAX_TRACE_LINES: Final = 200
#: Deepest nesting, most items of a collection and largest int in JSON; beyond that the value becomes text.
MAX_DEPTH: Final = 5

MAX_ITEMS: Final = 100

MAX_INT_BITS: Final = 1024
#: Prefix of the lines after the first line of a record.
_CONTINUED: Final = "    | "
#: Text that needs no quotes as a value: it contains nothing that ends it, starts a field or quotes.
_BARE_VALUE: Final = re.compile(r'[^\s"=\\]+')
#: Text that needs no quotes as a message, which may contain spaces.
_BARE_MESSAGE: Final = re.compile(r'[^"=]*')
#: Terminal colours by name of the level; other levels have none.
_LEVEL_COLOURS: Final = {
    "TRACE": "36",
    "DEBUG": "34",
    "INFO": "1",
    "SUCCESS": "1;32",
    "WARNING": "1;33",
    "ERROR": "1;31",
    "CRITICAL": "1;41",
}

_fields_here: ContextVar[Mapping[str, str]] = ContextVar("nekro_log_fields", default={})  # noqa: B039 - read only


def configure(
    *,
    level: str = "INFO",
    json_lines: bool = False,
    sink: TextIO | None = None,
    fields: Mapping[str, str] | None = None,
    redact: Callable[[str], str] | None = None,
    quiet: Collection[str] = (),
) -> None:
    """Send all log records to one sink; called once by the application, never at import.

    Args:
        level: lowest level that is written.
        json_lines: one JSON object per line instead of text: ``time`` (UTC), ``level``, ``logger``,
            ``event``, the bound fields, and ``exception`` with the traceback. Values are exact, up to the
            length limits that text has too.
        sink: None means standard error.
        fields: bound to every record; omitted in text form, where they would repeat on each line.
        redact: removes confidential parts of a text; applied to every message, value and traceback.
        quiet: names of loggers whose records are omitted.
    """
    constant = dict(fields or {})
    target = sink if sink is not None else sys.stderr
    hide = redact or str
    form = (
        _JsonForm(hide) if json_lines else _TextForm(hide, frozenset(constant), colours=has_colours(target))
    )
    logger.remove()
    logger.configure(extra={"name": "nekro", **constant}, patcher=_add_fields)
    logger.add(
        _Sink(target, form),
        level=level,
        format=_no_template,
        filter=lambda record: record["extra"].get("name") not in quiet,
        colorize=False,
        backtrace=False,
        # A traceback must not contain the values of variables, which may be secrets.
        diagnose=False,
    )


class StandardLogs(logging.Handler):
    """Passes records of the standard library to loguru, under the name of their logger."""

    def emit(self, record: logging.LogRecord) -> None:
        """Pass one record on."""
        try:
            level: str | int = logger.level(record.levelname).name
        except ValueError:
            level = record.levelno
        # Not record.args and not Celery's record.data: both contain the arguments of tasks.
        try:
            message = record.getMessage()
        except Exception:
            # An error in a library's logging call must not end the library's work.
            message = f"{_text(record.msg)} (its arguments do not fit)"
        logger.opt(exception=record.exc_info).bind(name=record.name).log(level, "{}", message)


def begin_fields(fields: Mapping[str, str]) -> Token[Mapping[str, str]]:
    """Add fields to the running context's log records until ``end_fields``.

    Like ``logger.contextualize``, but with fewer objects per context, because thousands of calls
    may wait in one process.
    """
    around = _fields_here.get()
    return _fields_here.set({**around, **fields} if around else fields)


def end_fields(token: Token[Mapping[str, str]]) -> None:
    """Undo ``begin_fields``.

    Raises:
        ValueError: ``begin_fields`` was called in another context.
    """
    _fields_here.reset(token)


def get_sub_logger(name: str, **bind: object) -> Logger:
    """Return a logger whose records carry ``name`` and the fields of ``bind``."""
    return logger.bind(name=name, **bind)


def _add_fields(record: Record) -> None:
    for name, value in _fields_here.get().items():
        record["extra"].setdefault(name, value)


def _no_template(record: Record) -> str:
    """Return an empty template, because the sink formats the record."""
    return ""


class _Sink:
    """Writes each record in one piece, because other threads and processes share the stream."""

    def __init__(self, target: TextIO, form: Callable[[Record], str]) -> None:
        self._target = target
        self._form = form

    def write(self, message: Message) -> None:
        """Write one record, ignoring loguru's formatted text."""
        self._target.write(self._form(message.record))

    def flush(self) -> None:
        """Flush the stream."""
        self._target.flush()


class _TextForm:
    """A record as a line of text, and its traceback as lines that continue it."""

    def __init__(self, redact: Callable[[str], str], left_out: Collection[str], *, colours: bool) -> None:
        self._redact = redact
        self._left_out = left_out
        self._colours = colours

    def __call__(self, record: Record) -> str:
        level = record["level"].name
        parts = [
            self._coloured(f"{record['time']:%Y-%m-%d %H:%M:%S.%f}"[:-3], "32"),
            self._coloured(f"{self._value(level):<8}", _LEVEL_COLOURS.get(level, "0")),
            self._coloured(self._value(record["extra"].get("name")), "36"),
            self._quoted(record["message"], _BARE_MESSAGE, MAX_MESSAGE_CHARS),
        ]
        for name, value in _fields(record).items():
            if name not in self._left_out:
                parts.append(f"{self._value(name)}={self._value(value)}")
        lines = [" ".join(parts)]
        for line in _traceback(record, self._redact):
            lines.append(_CONTINUED + visible(line, limit=MAX_FIELD_CHARS))
        return "\n".join(lines) + "\n"

    def _value(self, value: object) -> str:
        return self._quoted(_text(value), _BARE_VALUE, MAX_FIELD_CHARS)

    def _quoted(self, text: str, bare: re.Pattern[str], limit: int) -> str:
        # Redact first: shortening or escaping would change a secret so that it is not recognised.
        text = self._redact(text)
        shown = visible(text, limit=limit)
        if bare.fullmatch(shown):
            return shown
        text = text.replace("\\", "\\\\").replace('"', '\\"')
        return f'"{visible(text, limit=limit)}"'

    def _coloured(self, text: str, colour: str) -> str:
        return f"\x1b[{colour}m{text}\x1b[0m" if self._colours else text


class _JsonForm:
    """A record as one line of JSON."""

    def __init__(self, redact: Callable[[str], str]) -> None:
        self._redact = redact

    def __call__(self, record: Record) -> str:
        line: dict[str, Any] = {
            "time": record["time"].astimezone(UTC).isoformat(timespec="milliseconds"),
            "level": record["level"].name,
            "logger": record["extra"].get("name"),
            "event": shortened(self._redact(record["message"]), MAX_MESSAGE_CHARS),
        }
        for name, value in _fields(record).items():
            name = self._redact(name)
            line[f"{name}_" if name in line else name] = self._plain(value, depth=1)
        if record["exception"] is not None:
            trace = (shortened(text, MAX_FIELD_CHARS) for text in _traceback(record, self._redact))
            line["exception"] = "\n".join(trace) + "\n"
        return visible_json(json.dumps(line, ensure_ascii=False)) + "\n"

    def _plain(self, value: object, *, depth: int) -> Any:
        if value is None or isinstance(value, bool) or _is_number(value):
            return value
        if isinstance(value, Mapping | list | tuple) and depth <= MAX_DEPTH and len(value) <= MAX_ITEMS:
            if isinstance(value, Mapping):
                items = value.items()
                return {self._redact(_text(name)): self._plain(item, depth=depth + 1) for name, item in items}
            return [self._plain(item, depth=depth + 1) for item in value]
        return shortened(self._redact(_text(value)), MAX_FIELD_CHARS)


def _fields(record: Record) -> dict[str, Any]:
    return {name: value for name, value in record["extra"].items() if name != "name"}


def _is_number(value: object) -> bool:
    """Whether JSON can represent this number: it has no NaN, and Python limits the digits of an int."""
    if isinstance(value, float):
        return math.isfinite(value)
    return isinstance(value, int) and value.bit_length() <= MAX_INT_BITS


def _text(value: object) -> str:
    try:
        return str(value)
    except Exception:
        # Objects of plugins are logged; an error in their __str__ must not lose the record.
        return f"<{type(value).__name__} without text>"


def _traceback(record: Record, redact: Callable[[str], str]) -> list[str]:
    """Return the lines of the record's traceback without line ends; the middle of a long one is omitted."""
    error = record["exception"]
    if error is None:
        return []
    text = "".join(traceback.format_exception(error.type, error.value, error.traceback))
    lines = redact(text).rstrip("\n").split("\n")
    half = MAX_TRACE_LINES // 2
    if len(lines) > MAX_TRACE_LINES:
        lines[half:-half] = [f"… ({len(lines) - 2 * half} lines left out)"]
    return lines


#: Most links of a chain of exceptions that are searched.
_MAX_LINKS: Final = 20
#: Events that were logged, with plugin and error.
_logged: Final[set[tuple[str, str, str]]] = set()


def missing_name(exc: BaseException | None) -> PlaceholderUsedError | None:
    """Return the use of a placeholder that an exception is, or that a plugin has translated into it."""
    for _ in range(_MAX_LINKS):
        if exc is None or isinstance(exc, PlaceholderUsedError):
            return exc
        exc = exc.__cause__ or exc.__context__
    return None


def log_failure(
    log: Logger, event: str, exc: BaseException, *, plugin_key: str, level: str = "ERROR"
) -> None:
    """Log an exception of a plugin's code with its traceback.

    A name that does not exist here is known from ``nekro plugins`` and does not appear by waiting: its use is
    one warning for each plugin and event in a process, without a traceback.

    Args:
        log: bound to the fields of the event.
        level: of another exception.
    """
    missing = missing_name(exc)
    if missing is None:
        log.opt(exception=exc).log(level, event)
        return
    key = (event, plugin_key, str(missing))
    if key not in _logged:
        _logged.add(key)
        log.bind(error=str(missing)).warning(event)
