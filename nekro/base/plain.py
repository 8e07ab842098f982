"""Converts any value to one that JSON has."""

from __future__ import annotations

import dataclasses
import json
import math
from base64 import b64encode
from collections.abc import Mapping
from datetime import datetime
from enum import Enum
from typing import Any

__all__ = ["encodable", "known_fields", "to_json_value", "to_plain"]


def known_fields(kind: Any, stored: Mapping[str, Any]) -> dict[str, Any]:
    """Drop what a dataclass has no field for: another release may have stored more."""
    return {one.name: stored[one.name] for one in dataclasses.fields(kind) if one.name in stored}


def to_plain(value: object) -> Any:
    """Convert a value for JSON: bytes become ``{"base64": …}``, sets lists, unknown types their ``str``."""
    if value is None or (isinstance(value, (bool, int, float, str)) and not isinstance(value, Enum)):
        return value
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        items = sorted(value, key=repr) if isinstance(value, (set, frozenset)) else value
        return [to_plain(item) for item in items]
    if isinstance(value, (bytes, bytearray)):
        return {"base64": b64encode(value).decode()}
    if isinstance(value, datetime):
        return value.isoformat()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    return str(value)


def to_json_value(value: object) -> Any:
    """Like ``to_plain``; NaN and infinity, which JSON lacks, become None."""
    plain = to_plain(value)
    try:
        json.dumps(plain, allow_nan=False)
    except ValueError:
        return _finite(plain)
    return plain


def encodable(value: Any) -> Any:
    """Return JSON data without lone surrogates, which UTF-8 cannot encode; they become escapes."""
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, dict):
        return {encodable(key): encodable(item) for key, item in value.items()}
    return [encodable(item) for item in value] if isinstance(value, list) else value


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list) else value
