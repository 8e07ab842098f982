"""A record of every LLM request, for checking what a model was shown."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from nekro.agent.llm.port import LLMRequest
from nekro.agent.model import ImagePart, Part, TextPart
from nekro.agent.multimodal import image_data
from nekro_agent.files.private_files import make_directory

__all__ = ["RequestRecord"]


class RequestRecord:
    """Appends one JSON line for each request sent; without a path it does nothing.

    A line holds ``at``, ``client``, ``group``, ``model``, ``try``, ``round_id``, ``chat_key`` and
    ``messages``; images are shortened to type, length in bytes and SHA-256.
    """

    def __init__(self, path: Path | None, *, client: str, group: str = "default") -> None:
        self._path = path
        self._client = client
        self._group = group

    async def add(self, request: LLMRequest, *, model: str, number: int) -> None:
        """Write the line of one request without blocking the event loop."""
        if self._path is not None:
            await asyncio.to_thread(self._append, self._path, request, model, number)

    def _append(self, path: Path, request: LLMRequest, model: str, number: int) -> None:
        line = {
            "at": datetime.now(UTC).isoformat(),
            "client": self._client,
            "group": self._group,
            "model": model,
            "try": number,
            "round_id": request.round_id,
            "chat_key": request.chat_key,
            "messages": [
                {"role": message.role.value, "content": [_shorten(part) for part in message.parts]}
                for message in request.messages
            ],
        }
        data = json.dumps(line, ensure_ascii=False).encode("utf-8", "replace") + b"\n"
        make_directory(path.parent)
        # One write with O_APPEND, so that lines of several worker processes never mix; private to
        # this user, because it contains messages of people.
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            os.write(descriptor, data)
        finally:
            os.close(descriptor)


def _shorten(part: Part) -> dict[str, Any]:
    if isinstance(part, TextPart):
        return {"type": "text", "text": part.text}
    return {"type": "image_url", "image_url": _shorten_image(part)}


def _shorten_image(part: ImagePart) -> dict[str, Any]:
    decoded = image_data(part.url)
    if decoded is None:
        return {"url": part.url}
    media_type, data = decoded
    return {"media_type": media_type, "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
