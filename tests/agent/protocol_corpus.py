"""Responses of endpoints of Anthropic and Gemini and of their proxies, as in ``endpoint_corpus``."""

from __future__ import annotations

import json
from typing import Any, Final

from chat_server import Behaviour, hold, respond, send_raw
from endpoint_corpus import Case, Cut, error, events

from nekro_agent.errors import (
    LLMAccessError,
    LLMBusyError,
    LLMContextError,
    LLMError,
    LLMFilterError,
    LLMNotFoundError,
    LLMRefusedError,
    LLMUnavailableError,
    LLMUnreadableError,
)

__all__ = ["RESPONSES"]


def event(kind: str, **fields: Any) -> str:
    """One event of Anthropic."""
    return f"event: {kind}\ndata: {json.dumps({'type': kind} | fields)}\n\n"


START: Final = event("message_start", message={"id": "m", "type": "message", "role": "assistant", "content": [], "model": "claude", "stop_reason": None, "usage": {"input_tokens": 9, "output_tokens": 1}})  # fmt: skip
STOP: Final = event("message_stop")


def text(words: str = "Hello", index: int = 0) -> str:
    """Events of one block of text."""
    begin = event("content_block_start", index=index, content_block={"type": "text", "text": ""})
    delta = event("content_block_delta", index=index, delta={"type": "text_delta", "text": words})
    return begin + delta + event("content_block_stop", index=index)


def thought(words: str = "Secret.") -> str:
    """Events of one block of thinking, with its signature."""
    begin = event("content_block_start", index=0, content_block={"type": "thinking", "thinking": ""})
    delta = event("content_block_delta", index=0, delta={"type": "thinking_delta", "thinking": words})
    signed = event("content_block_delta", index=0, delta={"type": "signature_delta", "signature": "Eq"})
    return begin + delta + signed + event("content_block_stop", index=0)


def end(reason: str | None = "end_turn") -> str:
    """The event of the end of the text."""
    delta = {"stop_reason": reason, "stop_sequence": None}
    return event("message_delta", delta=delta, usage={"output_tokens": 12})


def whole(*content: Any, reason: str = "end_turn") -> tuple[Behaviour, ...]:
    """A message that is not streamed."""
    message = {"id": "m", "type": "message", "role": "assistant", "model": "claude", "content": list(content), "stop_reason": reason, "usage": {"input_tokens": 9, "output_tokens": 12}}  # fmt: skip
    return (respond(200, message),)


def failed(status: int, kind: str, message: str = "no", **headers: str) -> Behaviour:
    """An error of Anthropic."""
    return respond(status, {"type": "error", "error": {"type": kind, "message": message}}, **headers)


def anthropic(
    name: str, responses: tuple[Behaviour, ...], outcome: str | type[LLMError], source: str, requests: int = 1
) -> Case:
    return Case(name, responses, outcome, source, requests, "anthropic")


def part(*parts: Any, finish: str | None = None, **fields: Any) -> str:
    """One event of Gemini."""
    candidate: dict[str, Any] = {"index": 0}
    if parts:
        candidate["content"] = {"role": "model", "parts": list(parts)}
    if finish is not None:
        candidate["finishReason"] = finish
    return f"data: {json.dumps({'candidates': [candidate], 'modelVersion': 'gemini-x'} | fields)}\r\n\r\n"


USAGE: Final = {"promptTokenCount": 9, "candidatesTokenCount": 12, "totalTokenCount": 21}
GOOD: Final = part({"text": "Hel"}) + part({"text": "lo"}, finish="STOP", usageMetadata=USAGE)


def status(code: int, name: str, message: str = "no", *details: Any) -> Behaviour:
    """An error of Gemini."""
    return respond(code, {"error": {"code": code, "message": message, "status": name, "details": [*details]}})


RETRY: Final = {"@type": "type.googleapis.com/google.rpc.RetryInfo", "retryDelay": "0.01s"}
LATE: Final = {"@type": "type.googleapis.com/google.rpc.RetryInfo", "retryDelay": "7200.5s"}
DAILY: Final = {"@type": "type.googleapis.com/google.rpc.QuotaFailure", "violations": [{"quotaId": "GenerateRequestsPerDayPerProjectPerModel-FreeTier"}]}  # fmt: skip
BAD_KEY: Final = {"@type": "type.googleapis.com/google.rpc.ErrorInfo", "reason": "API_KEY_INVALID"}


def gemini(
    name: str, responses: tuple[Behaviour, ...], outcome: str | type[LLMError], source: str, requests: int = 1
) -> Case:
    return Case(name, responses, outcome, source, requests, "gemini")


OK: Final = events(START, text(), end(), STOP)
MINE: Final = events(GOOD)

# fmt: off
RESPONSES: Final = [
    # Anthropic: content.
    anthropic("Anthropic, a stream", OK, "Hello", "docs"),
    anthropic("Anthropic, two blocks of text", events(START, text("Hel"), text("lo", 1), end(), STOP), "Hello", "docs"),
    anthropic("Anthropic, thinking first", events(START, thought(), text(), end(), STOP), "Hello", "docs"),
    anthropic("Anthropic, redacted thinking", events(START, event("content_block_start", index=0, content_block={"type": "redacted_thinking", "data": "Secret."}), text(), end(), STOP), "Hello", "docs"),
    anthropic("Anthropic, thinking in one answer", whole({"type": "thinking", "thinking": "Secret.", "signature": "E"}, {"type": "text", "text": "Hello"}), "Hello", "docs"),
    anthropic("Anthropic, text in the start of a block", events(START, event("content_block_start", index=0, content_block={"type": "text", "text": "Hello"}), end(), STOP), "Hello", "variant"),
    anthropic("Anthropic, content in the start of a message", events(event("message_start", message={"content": [{"type": "text", "text": "Hello"}]}), end(), STOP), "Hello", "variant"),
    anthropic("Anthropic, a start without content", events(event("message_start", message={"id": "m"}), text(), end(), STOP), "Hello", "SaladDay/cc-switch-cli#320"),
    anthropic("Anthropic, no start", events(text(), end(), STOP), "Hello", "variant"),
    anthropic("Anthropic, one message instead of a stream", whole({"type": "text", "text": "Hello"}), "Hello", "variant"),
    anthropic("Anthropic, one message as an event", events(f"data: {json.dumps({'type': 'message', 'content': [{'type': 'text', 'text': 'Hello'}], 'stop_reason': 'end_turn'})}\n\n"), "Hello", "variant"),
    anthropic("Anthropic, no names of events", events((START + text() + end() + STOP).replace("event: ", ": ")), "Hello", "variant"),
    anthropic("Anthropic, citations", events(START, event("content_block_delta", index=0, delta={"type": "citations_delta", "citation": {"cited_text": "x"}}), text(), end(), STOP), "Hello", "docs"),
    anthropic("Anthropic, nothing written", events(START, end(), STOP), "", "docs"),
    # Anthropic: events.
    anthropic("Anthropic, pings", events(event("ping"), START, event("ping"), text(), event("ping"), end(), STOP), "Hello", "docs"),
    anthropic("Anthropic, unknown events", events(START, event("content_block_heartbeat", index=0), text(), event("usage_report", usage=5), end(), STOP), "Hello", "docs"),
    anthropic("Anthropic, unknown parts of blocks", events(START, event("content_block_delta", index=0, delta={"type": "text_style_delta", "text": "Secret."}), text(), end(), STOP), "Hello", "variant"),
    anthropic("Anthropic, [DONE] at the end", events(START, text(), end(), "data: [DONE]\n\n"), "Hello", "ihsan-ramadhan/bansos-router#3"),
    anthropic("Anthropic, no message_stop", events(START, text(), end()), "Hello", "esengine/DeepSeek-Reasonix#8756"),
    anthropic("Anthropic, only pings after the end", (hold(send_raw(START + text() + end() + event("ping"))),), "Hello", "tombii/better-ccflare#307"),
    anthropic("Anthropic, open after message_stop", (hold(send_raw(START + text() + end() + STOP)),), "Hello", "earendil-works/pi#5592"),
    anthropic("Anthropic, message_stop without a reason", events(START, text(), end(None), STOP), "Hello", "variant"),
    anthropic("Anthropic, no end at all", (*events(START, text("Hel")), *OK), "Hello", "tbphp/gpt-load#736", 2),
    # Anthropic: reasons to stop.
    anthropic("Anthropic, stop_sequence", events(START, text(), end("stop_sequence"), STOP), "Hello", "docs"),
    anthropic("Anthropic, max_tokens", events(START, text("Hel"), end("max_tokens"), STOP), Cut("Hel"), "docs"),
    anthropic("Anthropic, a full context", events(START, text("Hel"), end("model_context_window_exceeded"), STOP), Cut("Hel"), "tetsuo-ai/agenc-core#2111"),
    anthropic("Anthropic, pause_turn", events(START, text("Hel"), end("pause_turn"), STOP), Cut("Hel"), "open-gsd/gsd-pi#2042"),
    anthropic("Anthropic, an unknown reason", events(START, text("Hel"), end("compaction"), STOP), Cut("Hel"), "vercel/ai#8422"),
    anthropic("Anthropic, refusal", events(START, text("I"), end("refusal"), STOP), LLMFilterError, "laravel/ai#881"),
    anthropic("Anthropic, refusal in one answer", whole(reason="refusal"), LLMFilterError, "prism-php/prism#1003"),
    # Anthropic: errors.
    anthropic("Anthropic, overloaded in a stream", (*events(START, text("Hel"), event("error", error={"details": None, "type": "overloaded_error", "message": "Overloaded"})), *OK), "Hello", "anthropics/anthropic-sdk-python#1258", 2),
    anthropic("Anthropic, overloaded as the only event", (*events(event("error", error={"type": "overloaded_error", "message": "Overloaded"})), *OK), "Hello", "Helicone/helicone#4678", 2),
    anthropic("Anthropic, an error event of plain words", (*events(START, "event: error\ndata: upstream failed\n\n"), *OK), "Hello", "variant", 2),
    anthropic("Anthropic, rate limit in a stream", events(event("error", error={"type": "rate_limit_error", "message": "slow"})), LLMBusyError, "docs", 2),
    anthropic("Anthropic, overloaded", (failed(529, "overloaded_error", "Overloaded"), *OK), "Hello", "docs", 2),
    anthropic("Anthropic, rate limit", (failed(429, "rate_limit_error", "would exceed your organization's rate limit of 30,000 input tokens per minute", retry_after="0"), *OK), "Hello", "docs", 2),
    anthropic("Anthropic, rate limit for hours", (failed(429, "rate_limit_error", retry_after="7200"),), LLMBusyError, "docs"),
    anthropic("Anthropic, too long", (failed(400, "invalid_request_error", "prompt is too long: 208310 tokens > 200000 maximum"),), LLMContextError, "anthropics/claude-code#12186"),
    anthropic("Anthropic, too large", (failed(413, "request_too_large"),), LLMContextError, "docs"),
    anthropic("Anthropic, too long with the answer", (failed(400, "invalid_request_error", "input length and `max_tokens` exceed context limit: 188240 + 21333 > 200000, decrease input length or `max_tokens` and try again"),), LLMContextError, "docs"),
    anthropic("Anthropic, a wrong key", (failed(401, "authentication_error", "invalid x-api-key"),), LLMAccessError, "docs"),
    anthropic("Anthropic, no credit", (failed(400, "invalid_request_error", "Your credit balance is too low to access the Anthropic API."),), LLMAccessError, "docs"),
    anthropic("Anthropic, no such model", (failed(404, "not_found_error", "model: claude-0"),), LLMNotFoundError, "docs"),
    anthropic("Anthropic, an invalid request", (failed(400, "invalid_request_error", "messages: at least one message is required"),), LLMRefusedError, "docs"),
    anthropic("Anthropic, an internal error", (failed(500, "api_error", "Internal server error"), *OK), "Hello", "docs", 2),
    anthropic("Anthropic, temperature", (failed(400, "invalid_request_error", "`temperature` is deprecated for this model."), *OK), "Hello", "sipeed/picoclaw#2939", 2),
    anthropic("Anthropic, too many tokens of answers", (failed(400, "invalid_request_error", "max_tokens: 8192 > 4096, which is the maximum allowed number of output tokens for claude-3-opus-20240229"), *OK), "Hello", "anthropics/claude-code#11302", 2),
    anthropic("Anthropic asked, a chat completion answered", (respond(200, {"choices": [{"message": {"content": "Hello"}}]}),), LLMUnreadableError, "variant"),
    # Gemini: content.
    gemini("Gemini, a stream", MINE, "Hello", "docs"),
    gemini("Gemini, thoughts", events(part({"text": "Secret.", "thought": True}), GOOD), "Hello", "docs"),
    gemini("Gemini, a signature", events(part({"text": "Hello"}), part({"text": "", "thoughtSignature": "Eq"}, finish="STOP")), "Hello", "docs"),
    gemini("Gemini, an end without content", events(part({"text": "Hello"}), part(finish="STOP", usageMetadata=USAGE)), "Hello", "agentjido/req_llm#638"),
    gemini("Gemini, empty content", events(part({"text": "Hello"}), f"data: {json.dumps({'candidates': [{'content': {}, 'finishReason': 'STOP'}]})}\n\n"), "Hello", "vercel/ai#5039"),
    gemini("Gemini, usage first", events(f"data: {json.dumps({'usageMetadata': {'promptTokenCount': 9}})}\n\n", GOOD), "Hello", "variant"),
    gemini("Gemini, code that ran there", events(part({"executableCode": {"code": "Secret"}}, {"codeExecutionResult": {"output": "Secret"}}), GOOD), "Hello", "docs"),
    gemini("Gemini, one answer instead of a stream", (respond(200, {"candidates": [{"content": {"parts": [{"text": "Hello"}]}, "finishReason": "STOP"}]}),), "Hello", "docs"),
    gemini("Gemini, a list instead of a stream", (respond(200, [{"candidates": [{"content": {"parts": [{"text": "Hel"}]}}]}, {"candidates": [{"content": {"parts": [{"text": "lo"}]}, "finishReason": "STOP"}]}]),), "Hello", "docs"),
    gemini("Gemini, no end at all", (*events(part({"text": "Hel"})), *MINE), "Hello", "variant", 2),
    gemini("Gemini, open after the end", (hold(send_raw(GOOD)),), "Hello", "variant"),
    gemini("Gemini, [DONE] at the end", events(part({"text": "Hello"}), "data: [DONE]\n\n"), "Hello", "variant"),
    # Gemini: reasons to finish.
    gemini("Gemini, MAX_TOKENS", events(part({"text": "Hel"}, finish="MAX_TOKENS")), Cut("Hel"), "envoyproxy/ai-gateway#2107"),
    gemini("Gemini, MAX_TOKENS of thoughts", events(part(finish="MAX_TOKENS", usageMetadata={"thoughtsTokenCount": 99})), Cut(""), "envoyproxy/ai-gateway#2107"),
    gemini("Gemini, OTHER", events(part({"text": "Hel"}, finish="OTHER")), Cut("Hel"), "docs"),
    gemini("Gemini, LANGUAGE", events(part({"text": "Hel"}, finish="LANGUAGE")), Cut("Hel"), "docs"),
    gemini("Gemini, MALFORMED_FUNCTION_CALL", events(part(finish="MALFORMED_FUNCTION_CALL", finishMessage="Malformed function call: print()")), Cut(""), "0xPlaygrounds/rig#1030"),
    gemini("Gemini, UNEXPECTED_TOOL_CALL", (respond(200, {"candidates": [{"finishReason": "UNEXPECTED_TOOL_CALL"}]}),), Cut(""), "agentjido/req_llm#944"),
    gemini("Gemini, SAFETY", events(part({"text": "I"}, finish="SAFETY")), LLMFilterError, "docs"),
    gemini("Gemini, RECITATION", events(part(finish="RECITATION")), LLMFilterError, "docs"),
    gemini("Gemini, PROHIBITED_CONTENT", events(part(finish="PROHIBITED_CONTENT")), LLMFilterError, "MaKTaiL/gemini-srt-translator#133"),
    gemini("Gemini, a blocked prompt", events(f"data: {json.dumps({'promptFeedback': {'blockReason': 'PROHIBITED_CONTENT'}, 'usageMetadata': {'promptTokenCount': 9}})}\n\n"), LLMFilterError, "simonw/llm-gemini#144"),
    gemini("Gemini, a blocked prompt in one answer", (respond(200, {"promptFeedback": {"blockReason": "SAFETY"}}),), LLMFilterError, "docs"),
    # Gemini: errors.
    gemini("Gemini, quota of a minute", (status(429, "RESOURCE_EXHAUSTED", "You exceeded your current quota", RETRY), *MINE), "Hello", "googleapis/python-genai#2114", 2),
    gemini("Gemini, a long wait", (status(429, "RESOURCE_EXHAUSTED", "later", LATE),), LLMBusyError, "dcdpr/jp#1061"),
    gemini("Gemini, quota of a day", (status(429, "RESOURCE_EXHAUSTED", "You exceeded your current quota", DAILY, RETRY),), LLMAccessError, "dcdpr/jp#1061"),
    gemini("Gemini, busy in a list", error(429, [{"error": {"code": 429, "message": "Resource exhausted.", "status": "RESOURCE_EXHAUSTED"}}]), LLMBusyError, "google-gemini/gemini-cli#6454", 2),
    gemini("Gemini, too long", (status(400, "INVALID_ARGUMENT", "The input token count (1200000) exceeds the maximum number of tokens allowed (1048576)."),), LLMContextError, "google-gemini/gemini-cli#12214"),
    gemini("Gemini, a wrong key", (status(400, "INVALID_ARGUMENT", "API key not valid.", BAD_KEY),), LLMAccessError, "docs"),
    gemini("Gemini, no permission", (status(403, "PERMISSION_DENIED"),), LLMAccessError, "docs"),
    gemini("Gemini, no such model", (status(404, "NOT_FOUND"),), LLMNotFoundError, "docs"),
    gemini("Gemini, overloaded", (status(503, "UNAVAILABLE", "The model is overloaded."), *MINE), "Hello", "docs", 2),
    gemini("Gemini, overloaded in a stream", (*events(part({"text": "Hel"}), f"data: {json.dumps({'error': {'code': 503, 'message': 'overloaded', 'status': 'UNAVAILABLE'}})}\n\n"), *MINE), "Hello", "variant", 2),
    gemini("Gemini, an internal error", (status(500, "INTERNAL"),), LLMUnavailableError, "docs", 2),
    gemini("Gemini, no system instruction", (status(400, "INVALID_ARGUMENT", "Developer instruction is not enabled for models/gemma-3-27b-it"), *MINE), "Hello", "agno-agi/agno#3505", 2),
    gemini("Gemini asked, a chat completion answered", (respond(200, {"choices": [{"message": {"content": "Hello"}}]}),), LLMUnreadableError, "variant"),
]
# fmt: on
