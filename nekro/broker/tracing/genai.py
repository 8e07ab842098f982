"""OpenTelemetry's semantic conventions for generative AI: their names, and texts as attributes of spans.

The names are written here because the published package has them in a private module that is about to move
to another package, and takes long to import. A test compares them with that package. ``captures_content``
says whether texts of users, models and plugins are recorded, and ``content_text`` how.

Source: https://github.com/open-telemetry/semantic-conventions-genai (status: development).
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any, Final

from broker_config.settings import TracingSettings
from nekro_agent.tools.visible_text import shortened

__all__ = [
    "AGENT_NAME",
    "ARGUMENTS",
    "CHAT",
    "CONVERSATION_ID",
    "EXECUTE_TOOL",
    "FINISH_REASONS",
    "INPUT_MESSAGES",
    "INPUT_TOKENS",
    "INVOKE_AGENT",
    "MAX_TOKENS",
    "NEKRO",
    "OPERATION",
    "OUTPUT_MESSAGES",
    "OUTPUT_TOKENS",
    "PROVIDER",
    "REQUEST_MODEL",
    "RESPONSE_ID",
    "RESPONSE_MODEL",
    "RESULT",
    "STREAM",
    "TEMPERATURE",
    "TIME_TO_FIRST_CHUNK",
    "TOOL_CALL_ID",
    "TOOL_NAME",
    "TOOL_TYPE",
    "captures_content",
    "content_text",
]

OPERATION: Final = "gen_ai.operation.name"

PROVIDER: Final = "gen_ai.provider.name"

CONVERSATION_ID: Final = "gen_ai.conversation.id"

AGENT_NAME: Final = "gen_ai.agent.name"

REQUEST_MODEL: Final = "gen_ai.request.model"

MAX_TOKENS: Final = "gen_ai.request.max_tokens"

STREAM: Final = "gen_ai.request.stream"

TEMPERATURE: Final = "gen_ai.request.temperature"

RESPONSE_ID: Final = "gen_ai.response.id"

RESPONSE_MODEL: Final = "gen_ai.response.model"

FINISH_REASONS: Final = "gen_ai.response.finish_reasons"

TIME_TO_FIRST_CHUNK: Final = "gen_ai.response.time_to_first_chunk"

INPUT_TOKENS: Final = "gen_ai.usage.input_tokens"

OUTPUT_TOKENS: Final = "gen_ai.usage.output_tokens"

TOOL_NAME: Final = "gen_ai.tool.name"

TOOL_TYPE: Final = "gen_ai.tool.type"

TOOL_CALL_ID: Final = "gen_ai.tool.call.id"

# Recorded only if contents are captured.
INPUT_MESSAGES: Final = "gen_ai.input.messages"

OUTPUT_MESSAGES: Final = "gen_ai.output.messages"

ARGUMENTS: Final = "gen_ai.tool.call.arguments"

RESULT: Final = "gen_ai.tool.call.result"

# Values of OPERATION.
CHAT: Final = "chat"

EXECUTE_TOOL: Final = "execute_tool"

INVOKE_AGENT: Final = "invoke_agent"

#: The agent's name, and the provider of spans that several models may contribute to.
NEKRO: Final = "nekro"


#: OpenTelemetry's own switch of libraries that instrument models. Nothing is recorded as events here.
_VARIABLE: Final = "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT"

_ON: Final = ("true", "span_only", "span_and_event")
#: Longest attribute; a batch of 512 spans with one each is still below the memory of a small worker.
_MOST_CHARS: Final = 100_000
#: Limits of a text within an attribute: the first that makes the attribute short enough applies.
_TEXT_CHARS: Final = (32_000, 8_000, 2_000, 500, 100)


def captures_content(settings: TracingSettings) -> bool:
    """Whether spans contain texts, by the settings or by OpenTelemetry's variable."""
    return settings.capture_content or os.environ.get(_VARIABLE, "").strip().lower() in _ON


def content_text(content: object, redact: Callable[[str], str]) -> str | None:
    """Return JSON data as the text of an attribute, without secrets; None if it cannot be recorded.

    Only the beginning of long texts in it is recorded; the result is valid JSON.
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
