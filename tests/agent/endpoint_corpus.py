"""Responses of model endpoints as they were seen: name, responses, what must come of them, where they were seen.

A text: the answer is it, and complete unless it is a ``Cut``. An error class: the request fails with it.
Each response is one for one request; the last one is also given to further requests. A source is a repository
and a number of an issue or pull request, "docs" for the server's own documentation, or "variant". To add a
response, add a line.
"""

from __future__ import annotations

import json
from typing import Any, Final, NamedTuple

from chat_server import Behaviour, hold, respond, send_raw, stream

from broker_config.model_groups import ModelProtocol
from nekro_agent.errors import (
    LLMAccessError,
    LLMBusyError,
    LLMContextError,
    LLMError,
    LLMFilterError,
    LLMNotFoundError,
    LLMRefusedError,
    LLMUnavailableError,
)

__all__ = ["RESPONSES", "Case", "Cut", "error", "events"]


class Cut(str):
    """The text of an answer that was cut off, so that nothing of it may run."""

    __slots__ = ()


class Case(NamedTuple):
    """The responses to the requests of one question."""

    name: str
    responses: tuple[Behaviour, ...]
    outcome: str | type[LLMError]
    source: str
    #: Requests that are made.
    requests: int = 1
    protocol: ModelProtocol = "openai"


def chunk(delta: dict[str, Any] | None = None, finish: str | None = None, **fields: Any) -> str:
    """One event of a stream."""
    choices = [] if delta is None else [{"index": 0, "delta": delta, "finish_reason": finish}]
    return f"data: {json.dumps({'id': 'c', 'model': 'm', 'choices': choices} | fields)}\n\n"


def say(text: str = "Hello", finish: str | None = "stop") -> str:
    """Events of a whole answer, without the last one."""
    return chunk({"role": "assistant", "content": ""}) + chunk({"content": text}) + chunk({}, finish)


DONE: Final = "data: [DONE]\n\n"
WHOLE: Final = {
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "Hello"}, "finish_reason": "stop"}]
}


def events(*texts: str) -> tuple[Behaviour, ...]:
    """One response with these characters as a stream."""
    return (send_raw("".join(texts)),)


def error(status: int, body: Any) -> tuple[Behaviour, ...]:
    """One refusal."""
    return (respond(status, body),)


def worded(status: int, message: str) -> tuple[Behaviour, ...]:
    """A refusal with only these words."""
    return error(status, {"error": {"message": message, "type": "invalid_request_error", "code": None}})


THINKING: Final = {"type": "thinking", "thinking": [{"type": "text", "text": "Secret."}]}
TEXT: Final = {"type": "text", "text": "Hello"}
BUSY: Final = {"error": {"code": 429, "message": "Provider returned error"}}

# fmt: off
RESPONSES: Final = [
    # Content.
    Case("parts with thinking", events(chunk({"content": [THINKING]}), chunk({"content": [TEXT]}), chunk({}, "stop"), DONE), "Hello", "BerriAI/litellm#16272"),
    Case("parts in one answer", (respond(200, {"choices": [{"message": {"content": [THINKING, TEXT]}, "finish_reason": "stop"}]}),), "Hello", "variant"),
    Case("strings as parts", events(chunk({"content": ["Hel", "lo"]}), chunk({}, "stop"), DONE), "Hello", "variant"),
    Case("reasoning in a field", events(chunk({"reasoning_content": "Secret."}), say(), DONE), "Hello", "docs"),
    Case("reasoning in another field", events(chunk({"reasoning": "Secret."}), say(), DONE), "Hello", "docs"),
    Case("reasoning details", events(chunk({"reasoning_details": [{"type": "reasoning.text", "text": "Secret."}]}), say(), DONE), "Hello", "docs"),
    Case("a message in a stream", events(f"data: {json.dumps(WHOLE)}\n\n", DONE), "Hello", "variant"),
    Case("no role, no index", events('data: {"choices":[{"delta":{"content":"Hello"},"finish_reason":"stop"}]}\n\n', DONE), "Hello", "variant"),
    Case("empty choices first", events(chunk(None, prompt_filter_results=[]), say(), DONE), "Hello", "docs"),
    Case("choices null", events('data: {"choices": null}\n\n', say(), DONE), "Hello", "variant"),
    # Events.
    Case("retry before the first event", events("retry: 3000\n\n", say(), DONE), "Hello", "openai/openai-python#2722"),
    Case("an id before the first event", events("id: 1\n\n", say(), DONE), "Hello", "hermes-agent#111887"),
    Case("ids on each event", events("id: 1\nevent: message\n", say(), "id: 2\n", DONE), "Hello", "variant"),
    Case("empty data", events("data:\n\n", "data: \n\n", say(), DONE), "Hello", "openai/openai-python#2722"),
    Case("null as a heartbeat", events("data: null\n\n", say(), DONE), "Hello", "variant"),
    Case("a list as a heartbeat", events("data: []\n\n", say(), DONE), "Hello", "variant"),
    Case("a text as a heartbeat", events('data: "ping"\n\n', say(), DONE), "Hello", "variant"),
    Case("a word as a heartbeat", events("data: ping\n\n", say(), DONE), "Hello", "variant"),
    Case("an event of another type", events('event: ping\ndata: {"type": "ping"}\n\n', say(), DONE), "Hello", "docs"),
    Case("comments", events(": OPENROUTER PROCESSING\n\n", say(), ": bye\n\n", DONE), "Hello", "docs"),
    Case("line ends of Windows", events((say() + DONE).replace("\n", "\r\n")), "Hello", "variant"),
    Case("line ends of old Macs", events((say() + DONE).replace("\n", "\r")), "Hello", "variant"),
    Case("byte order mark", events("\ufeff", say(), DONE), "Hello", "variant"),
    Case("blank lines first", events("\n\n\r\n", say(), DONE), "Hello", "variant"),
    Case("no space behind the colon", events((say() + DONE).replace("data: ", "data:")), "Hello", "docs"),
    Case("another content type", (send_raw(say() + DONE, kind="text/plain"),), "Hello", "variant"),
    Case("JSON as content type", (send_raw(say() + DONE, kind="application/json"),), "Hello", "variant"),
    Case("last event without a blank line", events(say().rstrip("\n")), "Hello", "variant"),
    # Ends.
    Case("no finish reason", events(say(finish=None), DONE), "Hello", "CherryHQ/cherry-studio#7326"),
    Case("empty finish reason", events(say(finish=""), chunk(None, usage=None), DONE), "Hello", "sgl-project/sglang#3912"),
    Case("usage null", events(chunk({"content": "Hello"}, usage=None), chunk({}, "stop", usage=None), DONE), "Hello", "logfire#64"),
    Case("open after the end", (hold(send_raw(say())),), "Hello", "claude-code-router#1271"),
    Case("open after the end, with usage", (hold(send_raw(say() + chunk(None, usage={"prompt_tokens": 3}))),), "Hello", "variant"),
    Case("open after done", (hold(send_raw(say(finish=None) + DONE)),), "Hello", "variant"),
    Case("no end at all", (*events(chunk({"content": "Hel"})), stream("Hello")), "Hello", "variant", 2),
    Case("one completion instead of a stream", (respond(200, WHOLE),), "Hello", "variant"),
    Case("one completion as a stream's type", (send_raw(json.dumps(WHOLE)),), "Hello", "variant"),
    # Parameters.
    Case("stream_options, 422", (respond(422, {"detail": [{"type": "extra_forbidden", "loc": ["body", "stream_options"]}]}), stream("Hello")), "Hello", "openai-agents-python#442", 2),
    Case("stream_options, 400", (*worded(400, "Unknown parameter: stream_options"), stream("Hello")), "Hello", "docs", 2),
    Case("stream_options, 403", (*worded(403, "include_usage is not allowed here"), stream("Hello")), "Hello", "variant", 2),
    # Errors with status 200.
    Case("429 in a body", (respond(200, BUSY), stream("Hello")), "Hello", "nodetool#5755", 2),
    Case("429 in an event", (*events(f"data: {json.dumps(BUSY)}\n\n"), stream("Hello")), "Hello", "variant", 2),
    Case("429 as text in a body", (respond(200, {"error": {"code": "429", "message": "slow down"}}), stream("Hello")), "Hello", "variant", 2),
    Case("overflow in a body", (respond(200, {"error": {"message": "context length exceeded", "code": 400}}),), LLMContextError, "variant"),
    Case("an error event", (*events('event: error\ndata: {"message": "overloaded", "code": "503"}\n\n'), stream("Hello")), "Hello", "variant", 2),
    Case("an error without an object", (respond(200, {"error": "model is loading"}), stream("Hello")), "Hello", "variant", 2),
    Case("an old error of vLLM", (respond(200, {"object": "error", "message": "no", "code": 404}),), LLMNotFoundError, "docs"),
    Case("a code beside a message", (respond(200, {"code": "DataInspectionFailed", "message": "unsafe"}),), LLMFilterError, "docs"),
    Case("a status of MiniMax", (respond(200, {"base_resp": {"status_code": 2013, "status_msg": "context window exceeds limit"}}),), LLMContextError, "docs"),
    # Prompts that are too long.
    Case("xAI", error(400, {"code": "invalid argument", "error": "This model's maximum prompt length is 131072 but the request contains 537812 tokens."}), LLMContextError, "Bin-Huang/chatbox#2060"),
    Case("Gemini", error(400, [{"error": {"code": 400, "message": "The input token count (1200000) exceeds the maximum number of tokens allowed (1048576).", "status": "INVALID_ARGUMENT"}}]), LLMContextError, "google-gemini/gemini-cli#12214"),
    Case("Zhipu by its words", worded(400, "Prompt exceeds max length"), LLMContextError, "variant"),
    Case("Zhipu by its code", error(400, {"error": {"code": "1261", "message": "no"}}), LLMContextError, "docs"),
    Case("Anthropic", worded(400, "prompt is too long: 208310 tokens > 200000 maximum"), LLMContextError, "docs"),
    Case("Anthropic with the answer", worded(400, "input length and `max_tokens` exceed context limit: 188240 + 21333 > 200000"), LLMContextError, "variant"),
    Case("OpenAI", worded(400, "Your input exceeds the context window of this model."), LLMContextError, "docs"),
    Case("OpenAI, tokens", worded(400, "Input tokens exceed the configured limit of 272000 tokens."), LLMContextError, "variant"),
    Case("Mistral", worded(400, "Prompt contains 40000 tokens and 0 draft tokens, too large for model with 32768 maximum context length"), LLMContextError, "variant"),
    Case("Moonshot", worded(400, "Invalid request: Your request exceeded model token limit: 131072"), LLMContextError, "variant"),
    Case("DashScope", worded(400, "Range of input length should be [1, 30720]"), LLMContextError, "variant"),
    Case("TGI", error(422, {"error": "Input validation error: `inputs` must have less than 4096 tokens. Given: 5000", "error_type": "validation"}), LLMContextError, "variant"),
    Case("Together", error(422, {"error": "`inputs` tokens + `max_new_tokens` must be <= 8193."}), LLMContextError, "variant"),
    Case("LM Studio", worded(400, "Trying to keep the first 4833 tokens when context the overflows."), LLMContextError, "variant"),
    Case("Ollama", error(400, {"error": "input length exceeds maximum context length"}), LLMContextError, "variant"),
    Case("vLLM", worded(400, "The decoder prompt (length 5000) is longer than the maximum model length of 4096."), LLMContextError, "variant"),
    Case("SGLang", worded(400, "The input (5000 tokens) is longer than the model's context length (4096 tokens)."), LLMContextError, "variant"),
    Case("Groq", worded(400, "Please reduce the length of the messages or completion."), LLMContextError, "variant"),
    Case("Copilot", worded(400, "prompt token count of 140000 exceeds the limit of 128000"), LLMContextError, "variant"),
    Case("SiliconFlow", error(400, {"code": 20015, "message": "length of prompt_tokens (9) must be less than max_seq_len (8)."}), LLMContextError, "variant"),
    Case("llama.cpp", error(500, {"error": {"code": 500, "message": "the request exceeds the available context size", "type": "server_error"}}), LLMContextError, "variant"),
    Case("Cohere", error(400, {"message": "too many tokens: total number of tokens in the prompt cannot exceed 4081"}), LLMContextError, "variant"),
    # Other refusals.
    Case("too long an answer asked for", worded(400, "max_tokens is too large: 100000. This model supports at most 16384 completion tokens."), LLMRefusedError, "docs"),
    Case("tokens per minute", (*worded(429, "Request too large: limit 30000 tokens per min"),), LLMBusyError, "docs", 2),
    Case("quota of Moonshot", error(429, {"error": {"type": "exceeded_current_quota_error", "message": "pay"}}), LLMAccessError, "docs"),
    Case("no account", error(401, "Unauthorized"), LLMAccessError, "variant"),
    Case("overloaded", error(529, {"type": "error", "error": {"type": "overloaded_error", "message": "Overloaded"}}), LLMUnavailableError, "docs", 2),
]
# fmt: on
