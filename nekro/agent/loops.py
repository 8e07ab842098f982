"""Finds turns that are stuck in a loop: programs that repeat without a new result, and errors that repeat.

A program that is run again and returns something else, such as a job's progress, is not a repetition. Rounds
whose worker died, and those before them, do not count: their programs are not at fault, and a model may have
to repeat what led to the program that was lost.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from nekro.agent.model import TurnRound
from nekro.sandbox.models import StopType

__all__ = ["MOST_REPEATS", "error_of", "makes_no_progress", "repeats_of_code", "repeats_of_error"]

#: The third time ends the turn.
MOST_REPEATS: Final = 3

#: Stop types of programs that failed.
_FAILED: Final = frozenset({StopType.ERROR, StopType.TIMEOUT, StopType.SECURITY, StopType.DIVERGED})
#: Begins what the interpreter prints of an uncaught exception.
_TRACEBACK: Final = "Traceback (most recent call last):"
#: An error of the compiler, which is printed without that line.
_SYNTAX_ERROR: Final = re.compile(r"(?:Syntax|Indentation|Tab)Error: ")
#: Most characters of an error's line that are compared and shown.
_ERROR_CHARS: Final = 200


def repeats_of_code(code: str, earlier: Sequence[TurnRound]) -> int:
    """Return how many earlier rounds ran this program, if all of them had the same result; else 0.

    White space does not count. An empty program repeats nothing.
    """
    same = [item for item in _uninterrupted(earlier) if _words(item.code or "") == _words(code)]
    if not code.strip() or len({_result(item) for item in same}) > 1:
        return 0
    return len(same)


def repeats_of_error(last: TurnRound, earlier: Sequence[TurnRound]) -> int:
    """Return how many earlier rounds failed in the same way as the last one; 0 if it did not fail."""
    error = error_of(last)
    return sum(error_of(item) == error for item in _uninterrupted(earlier)) if error else 0


def makes_no_progress(last: TurnRound, earlier: Sequence[TurnRound]) -> bool:
    """Whether a round repeats a program, or fails in the manner of the round before it with nothing new.

    Nothing new: no method that no earlier round called, and no line of output that none printed.
    """
    if repeats_of_code(last.code or "", [*earlier, last]) > 1:
        return True
    error = error_of(last)
    if not earlier or not error or _kind(error) != _kind(error_of(earlier[-1])):
        return False
    called = {name for item in earlier for name in item.methods}
    printed = {line for item in earlier for line in _printed(item)}
    return called.issuperset(last.methods) and printed.issuperset(_printed(last))


def error_of(item: TurnRound) -> str:
    """Return how a round failed, as one line; "" if it did not.

    That is the error of its traceback, else the reason that the model was given and the last line of output.
    """
    if item.stop_type not in _FAILED or item.is_interrupted:
        return ""
    if item.stop_type is StopType.TIMEOUT:  # the reason names seconds, which differ at the end of a turn
        return StopType.TIMEOUT.name
    _, found, trace = item.output.rpartition(_TRACEBACK)
    # Frames are indented; the message of an error may have more lines, but begins here.
    raised = next((line for line in trace.split("\n") if line[:1].strip()), "") if found else ""
    last = _lines(item.output)[-1:]
    if not raised and last and _SYNTAX_ERROR.match(last[0]):
        raised = last[0]
    shown = raised or " ".join([item.reason, *last])
    return _words(shown)[:_ERROR_CHARS] or item.stop_type.name


def _uninterrupted(earlier: Sequence[TurnRound]) -> Sequence[TurnRound]:
    """Return the rounds after the last one whose worker died."""
    died = [at for at, item in enumerate(earlier, start=1) if item.is_interrupted]
    return earlier[max(died, default=0) :]


def _kind(error: str) -> str:
    return error.partition(":")[0]


def _printed(item: TurnRound) -> list[str]:
    return _lines(item.output.partition(_TRACEBACK)[0])


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.split("\n") if line.strip()]


def _result(item: TurnRound) -> tuple[object, ...]:
    observed = tuple((found.method, found.text, repr(found.segments or "")) for found in item.observations)
    return item.stop_type, item.output, item.reason, observed


def _words(text: str) -> str:
    return " ".join(text.split())
