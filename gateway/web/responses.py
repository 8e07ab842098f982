"""Forms of answers: JSON that can contain any text, and streams of server-sent events."""

from __future__ import annotations

import json
from typing import Any, Final

from fastapi import Request
from fastapi.responses import JSONResponse

__all__ = ["EVENT_STREAM", "PING_SECONDS", "SEND_SECONDS", "JsonAnswer", "accepts"]

EVENT_STREAM: Final = "text/event-stream"
#: Interval of a stream's comment lines, by which proxies and clients see that the connection stands.
PING_SECONDS: Final = 15
#: How long one write to a stream may take; then the reader is too slow, and its stream ends.
SEND_SECONDS: Final = 30


class JsonAnswer(JSONResponse):
    """Like ``JSONResponse``, in ASCII: a chat may contain lone surrogates, which UTF-8 does not have."""

    def render(self, content: Any) -> bytes:
        """Encode; everything outside of ASCII is escaped."""
        return json.dumps(content, ensure_ascii=True, allow_nan=False, separators=(",", ":")).encode()


def accepts(request: Request, media_type: str) -> bool:
    """Whether the request's ``Accept`` names a media type; patterns do not count."""
    stated = ",".join(request.headers.getlist("accept")).split(",")
    return media_type in {item.partition(";")[0].strip().lower() for item in stated}
