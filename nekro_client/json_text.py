"""JSON with any text: a chat may contain lone surrogates, which UTF-8 and pydantic's parser do not accept."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar

from pydantic import ValidationError

__all__ = ["json_bytes", "parsed_json"]

T = TypeVar("T")


def json_bytes(value: object) -> bytes:
    """Return a value as JSON in UTF-8; lone surrogates become JSON's escapes.

    Raises:
        ValueError, TypeError: it is no JSON value.
    """
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except UnicodeEncodeError:
        return json.dumps(value, allow_nan=False).encode()


def parsed_json(
    text: bytes | str, validate_json: Callable[[bytes | str], T], validate: Callable[[Any], T]
) -> T:
    """Return what a JSON text describes.

    Args:
        validate_json: pydantic's method for JSON, which is fast.
        validate: its method for parsed values, for texts that the other one refuses.

    Raises:
        ValidationError: the text is no JSON, or describes something else.
    """
    try:
        return validate_json(text)
    except ValidationError:
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            value = None
        if value is None:
            raise
        return validate(value)
