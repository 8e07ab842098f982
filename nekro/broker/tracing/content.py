"""Texts of users, models and plugins in spans: whether they are recorded, and how."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any, Final

from broker_config.settings import TracingSettings
from nekro_agent.tools.visible_text import shortened

__all__ = ["captures_content", "content_text"]

#: OpenTelemetry's own switch of libraries that instrument models. Nothing is recorded as events here.
_VARIABLE: Final = "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT"
_ON: Final = ("true", "span_only", "span_and_event")
#: Longest attribute; a batch of 512 spans with one each is still below the memory of a small worker.
_MOST_CHARS: Final = 100_000
#: Longest text within an attribute; the first limit with which the attribute is short enough applies.
_TEXT_CHARS: Final = (32_000, 8_000, 2_000, 500, 100)


def captures_content(settings: TracingSettings) -> bool:
    """Whether spans contain texts, by the settings or by OpenTelemetry's variable."""
    return settings.capture_content or os.environ.get(_VARIABLE, "").strip().lower() in _ON


def content_text(content: object, redact: Callable[[str], str]) -> str | None:
    """Return JSON data as the text of an attribute, without secrets; None if it cannot be recorded.

    Of long texts in it only the beginning is recorded; the result is valid JSON.
    """
    try:
        # Each text by itself: JSON may write the characters of a secret in another way.
        clean = _mapped(content, redact)
        for limit in _TEXT_CHARS:
            text = json.dumps(_cut(clean, limit), ensure_ascii=False)
            if len(text) <= _MOST_CHARS:
                return text.encode("utf-8", "replace").decode()
    except (TypeError, ValueError, RecursionError):
        return None
    return None


def _cut(content: object, limit: int) -> object:
    return _mapped(content, lambda text: shortened(text, limit))


def _mapped(content: object, change: Callable[[str], str]) -> Any:
    if isinstance(content, str):
        return change(content)
    if isinstance(content, dict):
        return {change(str(name)): _mapped(value, change) for name, value in content.items()}
    if isinstance(content, list | tuple):
        return [_mapped(item, change) for item in content]
    return content
