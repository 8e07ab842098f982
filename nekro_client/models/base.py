"""What all bodies and answers have in common, pages of lists, and problem documents."""

from __future__ import annotations

import math
from typing import Annotated, Any, Final, Generic, Self, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    JsonValue,
    ModelWrapValidatorHandler,
    ValidationError,
    model_validator,
)
from pydantic_core import PydanticCustomError

__all__ = [
    "Answer",
    "Body",
    "ChatKey",
    "Page",
    "PlainJson",
    "Problem",
]

Item = TypeVar("Item")
#: Faults of a body that are described one by one.
_MOST_FAULTS: Final = 100
#: Deepest nesting of JSON in a body.
MAX_DEPTH: Final = 64


def _bounded(value: JsonValue) -> JsonValue:
    """Refuse deep nesting, and numbers that JSON does not have."""
    waiting: list[tuple[JsonValue, int]] = [(value, 1)]
    while waiting:
        item, depth = waiting.pop()
        if depth > MAX_DEPTH:
            raise ValueError(f"it is nested deeper than {MAX_DEPTH} levels")
        if isinstance(item, float) and not math.isfinite(item):
            raise ValueError("NaN and infinity are not JSON")
        if isinstance(item, dict):
            waiting.extend((inner, depth + 1) for inner in item.values())
        elif isinstance(item, list):
            waiting.extend((inner, depth + 1) for inner in item)
    return value


def _named(text: str) -> str:
    if not text.strip():
        raise ValueError("it is empty")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{text!r} is not Unicode") from None
    return text


#: A JSON value of a body.
PlainJson = Annotated[JsonValue, AfterValidator(_bounded)]
#: The chat of a body; it names a directory.
ChatKey = Annotated[str, Field(min_length=1), AfterValidator(_named)]


class Body(BaseModel):
    """A request's body."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @model_validator(mode="wrap")
    @classmethod
    def _with_few_faults(cls, value: Any, validate: ModelWrapValidatorHandler[Self]) -> Self:
        # Each fault that is described takes a kilobyte; two bytes of a body can be one.
        try:
            return validate(value)
        except ValidationError as exc:
            count = exc.error_count()
            if count <= _MOST_FAULTS:
                raise
        raise PydanticCustomError("too_many_faults", "it has {count} faults", {"count": count})


class Answer(BaseModel):
    """A response's body, or a part of one."""

    # Validators are built at first use: a command needs few of them. (FastAPI takes no such bodies.)
    model_config = ConfigDict(extra="ignore", frozen=True, defer_build=True)


class Problem(Answer):
    """An error, as an RFC 9457 problem document (``application/problem+json``)."""

    type: str = "about:blank"
    title: str
    #: The HTTP status.
    status: int
    #: What went wrong, and what to do.
    detail: str
    #: Stable code of the error, for programs: ``not_found``, ``method_failed``, …
    code: str
    #: Identifies the request in logs and traces.
    request_id: str | None = None


class Page(Answer, Generic[Item]):
    """One page of a list."""

    items: list[Item]
    #: Pass it as ``?cursor=`` to read the next page; None after the last one.
    next_cursor: str | None = None
