"""Parameters of lists and waits, cursors and pages, answers made from rows."""

from __future__ import annotations

from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from http import HTTPStatus
from typing import Annotated, Any, Final, TypeVar

from pydantic import AfterValidator, AwareDatetime, BaseModel

from nekro.operations.actor import RefusedError
from nekro_client.models import Page

__all__ = [
    "MOST_WAIT_SECONDS",
    "Beginning",
    "Cursor",
    "Limit",
    "Moment",
    "OfChat",
    "Param",
    "answer_of",
    "cursor_invalid",
    "cursor_of",
    "number_of",
    "page_of",
    "place_of",
    "place_text",
    "text_of",
]

A = TypeVar("A", bound=BaseModel)
R = TypeVar("R")
T = TypeVar("T")
#: Longest wait for the end of a turn or of rounds in one request.
MOST_WAIT_SECONDS: Final = 300


@dataclass(frozen=True, kw_only=True)
class Param:
    """What the API demands and says of a parameter; a marker for ``Annotated``."""

    ge: int | None = None
    le: int | None = None
    min_length: int | None = None
    max_length: int | None = None
    #: Name in the URL; None: that of the argument.
    alias: str | None = None
    description: str | None = None


def _in_utc(moment: datetime) -> datetime:
    """Refuse a time that UTC does not have: in the first or last hours of all that can be written."""
    try:
        return moment.astimezone(UTC)
    except OverflowError:
        raise ValueError("it is before the year 1 or after the year 9999") from None


Limit = Annotated[int, Param(ge=1, le=200)]
Cursor = Annotated[str | None, Param(max_length=2000)]
OfChat = Annotated[str | None, Param(description="only of this chat")]
Beginning = Annotated[
    str, Param(alias="id", max_length=200, description="only those whose ids begin with this text")
]
#: A time with its offset.
Moment = Annotated[AwareDatetime, AfterValidator(_in_utc)]


def page_of(
    rows: Sequence[R],
    *,
    limit: int,
    answer: Callable[[R], T],
    position: Callable[[R], str | int],
    is_shown: Callable[[R], bool] = lambda row: True,
) -> Page[T]:
    """Return a page.

    Args:
        rows: at most ``limit + 1``; one more than the page shows that another page follows.
        answer: returns the model of a row.
        position: returns the place of a row in the list; the next page begins after it.
        is_shown: False leaves out a row of the page, which is shorter then.
    """
    shown = rows[:limit]
    more = cursor_of(position(shown[-1])) if len(rows) > limit else None
    return Page(items=[answer(row) for row in shown if is_shown(row)], next_cursor=more)


def cursor_of(position: str | int) -> str:
    """Return the opaque form of a position in a list."""
    return urlsafe_b64encode(str(position).encode("utf-8", "surrogatepass")).decode().rstrip("=")


def text_of(cursor: str) -> str:
    """Return the position of a cursor.

    Raises:
        RefusedError: 422, it is none of ours.
    """
    try:
        padded = cursor.encode("ascii") + b"=" * (-len(cursor) % 4)
        return urlsafe_b64decode(padded).decode("utf-8", "surrogatepass")
    except (ValueError, UnicodeError):
        raise cursor_invalid() from None


def number_of(cursor: str) -> int:
    """Return the position of a cursor that is a number.

    Raises:
        RefusedError: 422, it is none of ours.
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
        RefusedError: 422, it is none of ours.
    """
    moment, _, key = text_of(cursor).partition(" ")
    try:
        at = datetime.fromisoformat(moment)
        if at.tzinfo is None:
            raise cursor_invalid()
        return at.astimezone(UTC), key
    except (ValueError, OverflowError):
        raise cursor_invalid() from None


def cursor_invalid() -> RefusedError:
    """Return the error for a cursor that is none of a list's."""
    return RefusedError(
        HTTPStatus.UNPROCESSABLE_ENTITY, "cursor_invalid", "the cursor is not a next_cursor of this list"
    )


def answer_of(kind: type[A], source: object, **others: Any) -> A:
    """Return an answer with the fields of a row; ``others`` are those that differ in name or value."""
    same = {name: getattr(source, name) for name in kind.model_fields if name not in others}
    return kind(**same, **others)
