"""Models as JSON text, also when their texts hold lone surrogates, which output of code and plugins can."""

from __future__ import annotations

import json

from pydantic import BaseModel
from pydantic_core import PydanticSerializationError

__all__ = ["json_text"]


def json_text(model: BaseModel) -> str:
    """Return the JSON of a model; lone surrogates, which UTF-8 cannot encode, become JSON's escapes."""
    try:
        return model.model_dump_json()
    except PydanticSerializationError:
        return json.dumps(model.model_dump(mode="json"))
