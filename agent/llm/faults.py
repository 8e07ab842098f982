"""Names the faults of endpoints: by status and code first, by their words only where there is no code."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any, Final

import openai

from agent.llm.retry import NOT_CONNECTED, Fault, parse_retry_after
from nekro_agent.errors import (
    LLMAccessError,
    LLMBusyError,
    LLMContextError,
    LLMError,
    LLMFilterError,
    LLMNotFoundError,
    LLMRefusedError,
    LLMTimeoutError,
    LLMUnavailableError,
    LLMUnreadableError,
)
from nekro_agent.policies import group_variable

__all__ = ["ENDPOINT_ERRORS", "fault_of", "hint_of"]

#: What ``fault_of`` takes: errors of the package, and of the bytes that it reads.
ENDPOINT_ERRORS: Final = (openai.OpenAIError, json.JSONDecodeError, UnicodeDecodeError)

_BY_STATUS: Final[dict[int, type[LLMError]]] = {
    401: LLMAccessError,
    402: LLMAccessError,
    403: LLMAccessError,
    404: LLMNotFoundError,
    408: LLMTimeoutError,
    413: LLMContextError,
    429: LLMBusyError,
}
#: Codes and types of errors in the protocol, also inside streams, which have no status.
_BY_CODE: Final[dict[str, type[LLMError]]] = {
    "content_filter": LLMFilterError,
    "content_policy_violation": LLMFilterError,
    "context_length_exceeded": LLMContextError,
    "exceed_context_size_error": LLMContextError,
    "insufficient_quota": LLMAccessError,
    "invalid_api_key": LLMAccessError,
    "model_not_found": LLMNotFoundError,
    "rate_limit_exceeded": LLMBusyError,
    "string_above_max_length": LLMContextError,
}
#: How compatible servers without such a code word a prompt that is too long.
_TOO_LONG: Final = re.compile(
    r"maximum context length|context (?:length|window|size)|(?:prompt|input) is too long", re.IGNORECASE
)


def fault_of(exc: Exception, words: Callable[[BaseException], str]) -> Fault:
    """Return the fault that one of ``ENDPOINT_ERRORS`` reports.

    Args:
        words: returns the text of an error without secrets.
    """
    if isinstance(exc, openai.APIStatusError):
        return Fault(
            what=f"status {exc.status_code}: {words(exc)}",
            error=_error_of(exc, exc.status_code),
            status=exc.status_code,
            retry_after_seconds=parse_retry_after(exc.response.headers.get("retry-after")),
        )
    if isinstance(exc, openai.APIConnectionError):
        cause = exc.__cause__ or exc
        is_late = isinstance(exc, openai.APITimeoutError)
        return Fault(
            what=f"{NOT_CONNECTED}: {type(cause).__name__}: {words(cause)}",
            error=LLMTimeoutError if is_late else LLMUnavailableError,
        )
    if isinstance(exc, openai.APIError) and isinstance(exc.body, dict | str):
        return Fault(what=f"error instead of an answer: {words(exc)}", error=_error_of(exc, None))
    return Fault(what=f"unreadable answer: {words(exc)}", error=LLMUnreadableError)


def hint_of(fault: Fault, group: str) -> str:
    """Return what an operator can check for a group, in parentheses; "" if nothing is known."""
    key, url, model = (group_variable(group, value) for value in ("API_KEY", "BASE_URL", "MODEL"))
    if fault.retry_after_seconds is not None:
        return f" (it asks to wait {fault.retry_after_seconds:g} s)"
    if fault.error is LLMAccessError:
        return f" (check {key} and the account)"
    if fault.error is LLMNotFoundError:
        return f" (check {url}, which ends before /chat/completions, and {model})"
    if fault.error is LLMUnreadableError:
        return f" (check {url}, which ends before /chat/completions, and NEKRO_LLM__STREAM)"
    if fault.error is LLMContextError:
        return " (set NEKRO_LLM__CONTEXT_TOKENS or CONTEXT_TOKENS of its group to the context of the model)"
    if fault.status is None and fault.what.startswith(NOT_CONNECTED):
        return f" (check {url} and the network)"
    return ""


def _error_of(exc: openai.APIError, status: int | None) -> type[LLMError]:
    for name in (exc.code, exc.type):
        if isinstance(name, str) and name in _BY_CODE:
            return _BY_CODE[name]
    # An unknown route answers 404 with any text; only a refused request may be one that is too long.
    if status in (None, 400, 413, 422) and _TOO_LONG.search(_message(exc)):
        return LLMContextError
    if status is None or status >= 500:
        return LLMUnavailableError
    return _BY_STATUS.get(status, LLMRefusedError)


def _message(exc: openai.APIError) -> str:
    body: Any = exc.body
    found = body.get("message") if isinstance(body, dict) else body
    return found if isinstance(found, str) else exc.message
