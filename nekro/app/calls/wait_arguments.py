"""What a program asks to wait for: the arguments of the built-in methods that wait."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final, TypeGuard

from nekro.wire.values import decode_arguments
from nekro_agent.errors import ArgumentError
from nekro_agent.tools.visible_text import visible
from storage.states import WaitKind

__all__ = ["AskedWait", "asked_wait", "chosen", "question_text"]

_MOST_ARGUMENT_BYTES: Final = 64 << 10
_MOST_QUESTION_CHARS: Final = 2000
_MOST_CHOICES: Final = 20
_MOST_CHOICE_CHARS: Final = 100
#: Longer than any program waits: arithmetic with it does not overflow.
_LONGEST: Final = 1e9


@dataclass(frozen=True, kw_only=True)
class AskedWait:
    """A wait as a program asks for it."""

    kind: WaitKind
    #: Of the job.
    subject: str | None = None
    #: ``question`` and ``choices``.
    about: dict[str, Any] | None = None
    #: The time that it waits for.
    at: datetime | None = None
    #: How long it waits at most; None: as long as a program may wait.
    seconds: float | None = None


def asked_wait(name: str, text: str) -> AskedWait:
    """Read the arguments of a built-in method that waits.

    Args:
        text: tagged text.

    Raises:
        ArgumentError: they do not fit; nothing waits.
    """
    args, kwargs = decode_arguments(text, max_bytes=_MOST_ARGUMENT_BYTES)
    readers: dict[str, Callable[..., AskedWait]] = {
        "ask_user": _ask_user,
        "sleep_until": _sleep_until,
        "wait_for_job": _wait_for_job,
    }
    reader = readers[name]
    try:
        inspect.signature(reader).bind(*args, **kwargs)
    except TypeError as exc:
        raise ArgumentError(f"{name}: {exc}") from None
    return reader(*args, **kwargs)


def _wait_for_job(job_id: object, timeout: object = None) -> AskedWait:
    if not isinstance(job_id, str) or not job_id:
        raise ArgumentError(f"wait_for_job: job_id={job_id!r:.80} must be the id of a job, a text")
    return AskedWait(kind=WaitKind.JOB, subject=job_id, seconds=_seconds("wait_for_job", timeout))


def _sleep_until(time: object) -> AskedWait:
    return AskedWait(kind=WaitKind.TIME, at=_moment(time))


def _ask_user(question: object, choices: object = None, timeout: object = None) -> AskedWait:
    if not isinstance(question, str) or not question.strip():
        raise ArgumentError("ask_user: question must be a text that is not empty")
    if len(question) > _MOST_QUESTION_CHARS:
        raise ArgumentError(f"ask_user: question has more than {_MOST_QUESTION_CHARS} characters")
    about = {"question": question.strip(), "choices": _choices(choices)}
    return AskedWait(kind=WaitKind.ANSWER, about=about, seconds=_seconds("ask_user", timeout))


def _choices(choices: object) -> list[str]:
    if choices is None:
        return []
    if not isinstance(choices, list | tuple) or not 1 <= len(choices) <= _MOST_CHOICES:
        raise ArgumentError(f"ask_user: choices must be a list of 1 to {_MOST_CHOICES} texts")
    found = [_choice(one) for one in choices]
    if len({one.casefold() for one in found}) < len(found):
        raise ArgumentError("ask_user: choices must differ")
    return found


def _choice(value: object) -> str:
    """Return a choice that is one line, and that a client may send as a message of the person."""
    if not isinstance(value, str) or not value.strip() or len(value) > _MOST_CHOICE_CHARS:
        raise ArgumentError(f"ask_user: each choice must be a text of 1 to {_MOST_CHOICE_CHARS} characters")
    choice = value.strip()
    if choice != visible(choice):
        raise ArgumentError(f"ask_user: choice {visible(choice)} has invisible characters or lines")
    if choice.startswith("/"):
        # A button sends it as the person's own line: `/approve 17` would decide on a call.
        raise ArgumentError(f"ask_user: choice {choice!r} begins with /, as a command does")
    return choice


def _seconds(name: str, timeout: object) -> float | None:
    if timeout is None:
        return None
    if not _is_number(timeout) or timeout <= 0:
        raise ArgumentError(f"{name}: timeout={timeout!r:.80} must be a number of seconds above 0")
    return float(min(timeout, _LONGEST))


def _moment(time: object) -> datetime:
    wanted = "a datetime with a time zone, a timestamp in seconds, or a text as 2030-01-31T09:00:00+00:00"
    try:
        if _is_number(time):
            return datetime.fromtimestamp(time, UTC)
        moment = datetime.fromisoformat(time) if isinstance(time, str) else time
        if isinstance(moment, datetime) and moment.utcoffset() is not None:
            return moment.astimezone(UTC)
    except (ValueError, OverflowError, OSError):
        pass
    raise ArgumentError(f"sleep_until: {time!r:.80} must be {wanted}")


def _is_number(value: object) -> TypeGuard[float]:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return isinstance(value, int) or math.isfinite(value)


def question_text(about: dict[str, Any]) -> str:
    """Return a question as a message to people."""
    lines = [about["question"]]
    lines += (f"{number}. {choice}" for number, choice in enumerate(about["choices"], 1))
    return "\n".join(lines)


def chosen(text: str, choices: Sequence[str]) -> str:
    """Return the choice that a person's answer names by its text or number, else the answer."""
    answer = text.strip()
    for number, choice in enumerate(choices, 1):
        if answer.casefold() in (choice.casefold(), str(number)):
            return choice
    return answer
