"""Read what endpoints send for one request: server-sent events or one JSON value, and the faults in it.

Endpoints deviate from their protocols: each value may have any type, events may be heartbeats of any form,
and an error may come with status 200. What can be understood is used; an answer without an end is no answer.
A fault is named by status and code first, by its words only where there is no code.
"""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterable, Callable
from dataclasses import replace
from typing import Any, Final

import httpx

from nekro.agent.llm.attempt import NOT_CONNECTED, Fault, Gathered, TryFailed, unreadable
from nekro.agent.llm.protocols import ChatProtocol
from nekro_agent.durations import stated_pause
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
from nekro_agent.runtime import group_variable
from nekro_client.answer_limits import AnswerTooLargeError, EncodedAnswerError
from nekro_client.sse import EventParser

__all__ = [
    "error_in",
    "fault_of_error",
    "fault_of_response",
    "fault_of_transport",
    "hint_of",
    "read_answer",
]


_BY_STATUS: Final[dict[int, type[LLMError]]] = {
    401: LLMAccessError,
    402: LLMAccessError,
    403: LLMAccessError,
    404: LLMNotFoundError,
    408: LLMTimeoutError,
    413: LLMContextError,
    429: LLMBusyError,
}
#: Codes, types and status names of errors, in lower case: of OpenAI, Anthropic, Gemini, Zhipu, Moonshot,
#: DashScope, llama.cpp and others. Compatible servers and gateways pass them on.
_BY_CODE: Final[dict[str, type[LLMError]]] = {
    "1261": LLMContextError,
    "1301": LLMFilterError,
    "1302": LLMBusyError,
    "1305": LLMBusyError,
    "api_error": LLMUnavailableError,
    "api_key_invalid": LLMAccessError,
    "arrearage": LLMAccessError,
    "authentication_error": LLMAccessError,
    "billing_error": LLMAccessError,
    "content_filter": LLMFilterError,
    "content_policy_violation": LLMFilterError,
    "context_length_exceeded": LLMContextError,
    "context_window_exceeded": LLMContextError,
    "contextwindowexceedederror": LLMContextError,
    "data_inspection_failed": LLMFilterError,
    "datainspectionfailed": LLMFilterError,
    "deadline_exceeded": LLMTimeoutError,
    "engine_overloaded_error": LLMBusyError,
    "exceed_context_size_error": LLMContextError,
    "exceeded_current_quota_error": LLMAccessError,
    "insufficient_quota": LLMAccessError,
    "invalid_api_key": LLMAccessError,
    "model_max_prompt_tokens_exceeded": LLMContextError,
    "model_not_found": LLMNotFoundError,
    "not_found_error": LLMNotFoundError,
    "overloaded_error": LLMUnavailableError,
    "permission_denied": LLMAccessError,
    "permission_error": LLMAccessError,
    "quota_per_day": LLMAccessError,
    "rate_limit_error": LLMBusyError,
    "rate_limit_exceeded": LLMBusyError,
    "rate_limit_reached_error": LLMBusyError,
    "request_too_large": LLMContextError,
    "resource_exhausted": LLMBusyError,
    "string_above_max_length": LLMContextError,
    "timeout_error": LLMTimeoutError,
    "unauthenticated": LLMAccessError,
}
#: How servers word a prompt that is too long, without such a code. Each line has its servers.
_TOO_LONG: Final = re.compile(
    "|".join(
        (
            r"maximum context length|context (?:length|window|size|limit)",  # OpenAI, vLLM, SGLang, llama.cpp
            r"(?:prompt|input)(?: \(total length \d+\))? is too (?:long|large)",  # Anthropic, vLLM
            r"prompt too long|prompt tokens? too long|prompt exceeds max",  # Ollama, Baidu, Zhipu
            r"maximum (?:prompt|model|input) length|max_seq_len",  # xAI, vLLM, SiliconFlow
            r"maximum number of (?:input )?tokens|token count[^.]{0,60}exceed",  # Gemini, Copilot
            r"tokens?(?: of [^.]{1,40})? exceeds?\b",  # Volcengine
            r"exceed(?:s|ed)?[^.]{0,40}\b(?:model )?token limit|exceed context limit",  # Moonshot, Anthropic
            r"cannot exceed \d+|too many tokens",  # Cohere
            r"(?:must have less than|must be <=) \d+(?: tokens)?",  # TGI, Together
            r"range of input length should be",  # DashScope
            r"input length exceeds|longer than the (?:maximum )?(?:model|context)",  # Ollama, vLLM, SGLang
            r"reduce the length of the (?:messages|prompt|input)",  # Groq, Cerebras, OpenAI
            r"tokens to keep from the initial prompt|context the overflows",  # LM Studio
            r"too large for model with \d+",  # Mistral
            # "exceeds the length", "length exceeds", in Chinese
            r"\u8d85\u51fa.{0,12}\u957f\u5ea6|\u957f\u5ea6.{0,12}\u8d85(?:\u8fc7|\u51fa|\u9650)",
        )
    ),
    re.IGNORECASE,
)
#: An account without credit, where the code says only that the request is invalid (Anthropic).
_NO_CREDIT: Final = re.compile(r"credit balance is too low", re.IGNORECASE)
#: What looks like it and is not: a limit of the answer, or of a minute.
_OTHER_LIMIT: Final = re.compile(
    r"max(?:imum)?[ _](?:completion|output|new)[ _]tokens? (?:is|must|cannot)|max_tokens (?:is|must|cannot)"
    r"|per (?:min|minute|day|hour)\b|rate limit|quota",
    re.IGNORECASE,
)


def error_in(body: object) -> object | None:
    """Return the error that the JSON of an endpoint holds; None if it is no error.

    Servers send an object or a text in `error`, a list around that, a code beside a message (DashScope, old
    vLLM), or a status in `base_resp` (MiniMax).
    """
    if isinstance(body, list):
        found = [error for one in body[:8] if (error := error_in(one)) is not None]
        return found[0] if found else None
    if not isinstance(body, dict):
        return None
    if body.get("error"):
        return body["error"] if isinstance(body["error"], dict | str) else body
    if body.get("object") == "error" or ("choices" not in body and {"code", "message"} <= body.keys()):
        return body
    base = body.get("base_resp")
    if isinstance(base, dict) and base.get("status_code"):
        return {"code": base["status_code"], "message": base.get("status_msg")}
    return None


def fault_of_error(error: object, status: int | None, words: Callable[[str], str]) -> Fault:
    """Return the fault that an error of an endpoint reports.

    Args:
        error: what ``error_in`` returned.
        status: that of the response if it says more than 200; else a code of the error counts as one.
        words: returns a text without secrets, on one short line.
    """
    codes, message = _codes_of(error), _message_of(error)
    if status is None:
        numbers = [int(code) for code in codes if code.isascii() and code.isdigit() and len(code) == 3]
        status = next((number for number in numbers if 400 <= number < 600), None)
        what = f"error instead of an answer: {words(message)}"
    else:
        what = f"status {status}: {words(message)}"
    return Fault(
        what=what,
        error=_error_of(codes, message, status),
        status=status,
        retry_after_seconds=_retry_delay(error),
    )


def fault_of_response(
    status: int, body: bytes, retry_after: str | None, words: Callable[[str], str]
) -> Fault:
    """Return the fault that a response with another status than 200 reports."""
    text = body.decode("utf-8", "replace")
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    error = error_in(found)
    fault = fault_of_error(text if error is None else error, status, words)
    seconds = stated_pause(retry_after)
    return fault if seconds is None else replace(fault, retry_after_seconds=seconds)


def fault_of_transport(exc: httpx.HTTPError | httpx.InvalidURL, words: Callable[[str], str]) -> Fault:
    """Return the fault of a connection that failed."""
    if isinstance(exc, AnswerTooLargeError | EncodedAnswerError):
        return Fault(what=words(str(exc)), error=LLMUnreadableError)
    is_late = isinstance(exc, httpx.TimeoutException)
    return Fault(
        what=f"{NOT_CONNECTED}: {type(exc).__name__}: {words(str(exc))}",
        error=LLMTimeoutError if is_late else LLMUnavailableError,
    )


def hint_of(fault: Fault, group: str, *, path: str) -> str:
    """Return what an operator can check for a group, in parentheses; "" if nothing is known.

    Args:
        path: what follows the base URL.
    """
    key, url, model = (group_variable(group, value) for value in ("API_KEY", "BASE_URL", "MODEL"))
    if fault.retry_after_seconds is not None:
        return f" (it asks to wait {fault.retry_after_seconds:g} s)"
    if fault.error is LLMAccessError:
        return f" (check {key} and the account)"
    if fault.error is LLMNotFoundError:
        return f" (check {url}, which ends before {path}, and {model})"
    if fault.error is LLMUnreadableError:
        protocol = group_variable(group, "PROTOCOL")
        return f" (check {url}, which ends before {path}, {protocol} and NEKRO_LLM__STREAM)"
    if fault.error is LLMContextError:
        return " (set NEKRO_LLM__CONTEXT_TOKENS or CONTEXT_TOKENS of its group to the context of the model)"
    if fault.status is None and fault.what.startswith(NOT_CONNECTED):
        return f" (check {url} and the network)"
    return ""


def _error_of(codes: list[str], message: str, status: int | None) -> type[LLMError]:
    for code in codes:
        if code.lower() in _BY_CODE:
            return _BY_CODE[code.lower()]
    # An unknown route answers 404 with any text; only a refused request may be one that is too long.
    is_refused = status in (None, 400, 413, 422) or (status is not None and status >= 500)
    if is_refused and _NO_CREDIT.search(message):
        return LLMAccessError
    if is_refused and _TOO_LONG.search(message) and not _OTHER_LIMIT.search(message):
        return LLMContextError
    if status is None or status >= 500:
        return LLMUnavailableError
    return _BY_STATUS.get(status, LLMRefusedError)


def _codes_of(error: object) -> list[str]:
    if not isinstance(error, dict):
        return []
    found = [*_reasons(error), *map(error.get, ("code", "type", "status"))]
    return [str(code) for code in found if isinstance(code, str | int) and not isinstance(code, bool)]


def _details(error: dict[str, Any]) -> list[dict[str, Any]]:
    listed = error.get("details")
    return [one for one in listed[:8] if isinstance(one, dict)] if isinstance(listed, list) else []


def _reasons(error: dict[str, Any]) -> list[object]:
    """Return what Google's details add to the status: 400 for an invalid key, 429 for a quota of a day."""
    details = _details(error)
    listed = [one["violations"] for one in details if isinstance(one.get("violations"), list)]
    quotas = [one.get("quotaId") for many in listed for one in many[:8] if isinstance(one, dict)]
    is_daily = any(isinstance(quota, str) and "PerDay" in quota for quota in quotas)
    return [*(["quota_per_day"] if is_daily else []), *(one.get("reason") for one in details)]


def _retry_delay(error: object) -> float | None:
    """Return the seconds that Google's ``RetryInfo`` requests, such as ``"34.07s"``."""
    for detail in _details(error) if isinstance(error, dict) else []:
        delay = detail.get("retryDelay")
        if isinstance(delay, str):
            return stated_pause(delay.removesuffix("s"))
    return None


def _message_of(error: object) -> str:
    """Return an error's words; those of an object without a message are its JSON."""
    if isinstance(error, str):
        return error
    found: Any = error.get("message") if isinstance(error, dict) else None
    return found if isinstance(found, str) else json.dumps(error, ensure_ascii=False, default=str)


#: Most bytes that may carry an answer: far above what models write.
_MOST_BYTES: Final = 64 << 20
_END: Final = "[DONE]"
#: What may stand before a JSON value or the first event.
_BLANK: Final = b"\xef\xbb\xbf \t\r\n"


async def read_answer(
    chunks: AsyncIterable[bytes],
    gathered: Gathered,
    protocol: ChatProtocol,
    *,
    kind: str,
    on_sign: Callable[[], None],
) -> None:
    """Read a response with status 200 up to its end, or to the end of the answer in it.

    Whether it is a stream follows from its first bytes: endpoints ignore ``stream``, and name wrong types.

    Args:
        kind: the content type, for errors.
        on_sign: called after each event with text, reasoning or an end; not for heartbeats.

    Raises:
        TryFailed: an error instead of an answer, or something else.
    """
    parser, head, size = EventParser(), b"", 0
    is_stream: bool | None = None
    async for chunk in chunks:
        size += len(chunk)
        if size > _MOST_BYTES:
            raise unreadable(f"the response has more than {_MOST_BYTES} bytes")
        if not is_stream:
            head += chunk
            first = head.lstrip(_BLANK)[:1] if is_stream is None else b""
            if first:
                is_stream = first not in b"{[<"
            if not is_stream:
                continue
            chunk = head
        if _read_events(parser, chunk, gathered, protocol, on_sign):
            return
    if is_stream:
        _read_events(parser, b"\n\n", gathered, protocol, on_sign)  # the last event may lack its end
    else:
        _read_whole(head.lstrip(_BLANK), gathered, protocol, kind)
        on_sign()


def _read_events(
    parser: EventParser,
    chunk: bytes,
    gathered: Gathered,
    protocol: ChatProtocol,
    on_sign: Callable[[], None],
) -> bool:
    """Read the events that a chunk completes; return whether the answer is over."""
    for event in parser.feed(chunk):
        data, is_error = event.data.strip(), event.type == "error"
        if data == _END:
            gathered.finish_reason = gathered.finish_reason or "stop"
            gathered.is_over = True
        elif data.startswith("{"):
            found = _parsed(data, gathered)
            error = error_in(found) or (found if is_error else None)
            if error is not None:
                raise TryFailed(fault_of_error(error, None, gathered.words))
            if protocol.read_event(found, gathered):
                on_sign()
        elif is_error and data:
            raise TryFailed(fault_of_error(data, None, gathered.words))
        # Anything else is a heartbeat.
        if gathered.is_over:
            return True
    return False


def _parsed(data: str, gathered: Gathered) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(data)
    except (ValueError, RecursionError) as exc:
        what = f"unreadable answer: {gathered.words(str(exc))}"
        raise TryFailed(Fault(what=what, error=LLMUnreadableError)) from exc
    return found


def _read_whole(body: bytes, gathered: Gathered, protocol: ChatProtocol, kind: str) -> None:
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        raise unreadable(f"the response is {kind or 'something'}, not a chat completion") from None
    error = error_in(found)
    if error is not None:
        raise TryFailed(fault_of_error(error, None, gathered.words))
    protocol.read_whole(found, gathered)
    gathered.is_over = True
