"""Cursors and sizes of pages."""

from __future__ import annotations

from base64 import urlsafe_b64decode, urlsafe_b64encode
from datetime import UTC, datetime
from http import HTTPStatus
from typing import Annotated

from fastapi import Query
from pydantic import AfterValidator, AwareDatetime

from nekro.gateway.problems import ProblemError

__all__ = [
    "Cursor",
    "Limit",
    "Moment",
    "cursor_invalid",
    "cursor_of",
    "number_of",
    "place_of",
    "place_text",
    "text_of",
]


def _in_utc(moment: datetime) -> datetime:
    """Refuse a time that UTC does not have: in the first or last hours of all that can be written."""
    try:
        return moment.astimezone(UTC)
    except OverflowError:
        raise ValueError("it is before the year 1 or after the year 9999") from None


Limit = Annotated[int, Query(ge=1, le=200)]
Cursor = Annotated[str | None, Query(max_length=2000)]
#: A time with its offset.
Moment = Annotated[AwareDatetime, AfterValidator(_in_utc)]


def cursor_of(position: str | int) -> str:
    """Return the opaque form of a position in a list."""
    return urlsafe_b64encode(str(position).encode("utf-8", "surrogatepass")).decode().rstrip("=")


def text_of(cursor: str) -> str:
    """Return the position of a cursor.

    Raises:
        ProblemError: 422, it is none of ours.
    """
    try:
        padded = cursor.encode("ascii") + b"=" * (-len(cursor) % 4)
        return urlsafe_b64decode(padded).decode("utf-8", "surrogatepass")
    except (ValueError, UnicodeError):
        raise cursor_invalid() from None


def number_of(cursor: str) -> int:
    """Return the position of a cursor that is a number.

    Raises:
        ProblemError: 422, it is none of ours.
    """
    text = text_of(cursor)
    if not (text.isascii() and text.isdigit() and len(text) < 19):
        raise cursor_invalid()
    return int(text)


def place_text(at: datetime, key: str) -> str:
    """Return the position of a list that is in the order of times, then keys, for ``cursor_of``."""
    return f"{at.isoformat()} {key}"


def place_of(cursor: str) -> tuple[datetime, str]:
    """Return time and key of a cursor that was made with ``place_text``.

    Raises:
        ProblemError: 422, it is none of ours.
    """
    moment, _, key = text_of(cursor).partition(" ")
    try:
        at = datetime.fromisoformat(moment)
        if at.tzinfo is None:
            raise cursor_invalid()
        return at.astimezone(UTC), key
    except (ValueError, OverflowError):
        raise cursor_invalid() from None


def cursor_invalid() -> ProblemError:
    """Return the error for a cursor that is none of a list's."""
    return ProblemError(
        HTTPStatus.UNPROCESSABLE_ENTITY, "cursor_invalid", "the cursor is not a next_cursor of this list"
    )
