"""JSON answers that can contain any text: a chat may contain lone surrogates, which UTF-8 does not have."""

from __future__ import annotations

import json
from typing import Any

from fastapi.responses import JSONResponse

__all__ = ["JsonAnswer"]


class JsonAnswer(JSONResponse):
    """Like ``JSONResponse``, in ASCII."""

    def render(self, content: Any) -> bytes:
        """Encode; everything outside of ASCII is escaped."""
        return json.dumps(content, ensure_ascii=True, allow_nan=False, separators=(",", ":")).encode()
