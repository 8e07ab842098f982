"""Models as JSON text, also when their texts hold lone surrogates, which output of code and plugins can."""

from __future__ import annotations

import json

from pydantic import BaseModel
from pydantic_core import PydanticSerializationError, to_jsonable_python

__all__ = ["json_text"]


def json_text(model: BaseModel) -> str:
    """Return the JSON of a model; lone surrogates, which UTF-8 cannot encode, become JSON's escapes."""
    try:
        return model.model_dump_json()
    except PydanticSerializationError:
        return json.dumps(_plain(model.model_dump(mode="python")))


def _plain(value: object) -> object:
    """Return the value with what JSON lacks (times, states) converted; strings stay as they are."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, str):
        return str(value)
    return to_jsonable_python(value)
