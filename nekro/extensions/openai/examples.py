"""Examples of the OpenAPI document: requests and answers of OpenAI's API."""

from __future__ import annotations

from typing import Final

from nekro.gateway.document.examples import JSON, SPOKEN, TURN, Examples
from nekro.gateway.web.responses import EVENT_STREAM

__all__ = ["EXAMPLES"]

_RESPONSE: Final = "resp_98f13708210194c475687be6106a3b84"
_MODEL: Final = {"id": "nekro", "object": "model", "created": 0, "owned_by": "nekro-workers"}
_RESPONSE_ANSWER: Final = {
    "id": _RESPONSE,
    "object": "response",
    "created_at": 1772442900,
    "status": "completed",
    "model": "nekro",
    "output": [
        {
            "id": "msg_0",
            "type": "message",
            "role": "assistant",
            "status": "completed",
            "content": [{"type": "output_text", "text": SPOKEN, "annotations": []}],
        }
    ],
    "usage": {"input_tokens": 2140, "output_tokens": 46, "total_tokens": 2186},
}
_COMPLETION: Final = f"chatcmpl-{TURN}"
_RESPONSE_EVENTS: Final = (
    'event: response.output_text.delta\ndata: {"type":"response.output_text.delta","sequence_number":4,'
    '"item_id":"msg_0","output_index":0,"content_index":0,"delta":"You have ","logprobs":[]}\n\n'
)

EXAMPLES: Final = Examples(
    parameters={
        "model": "nekro",
        "response_id": _RESPONSE,
    },
    models={
        "CompletionBody": {
            "model": "nekro",
            "user": "ada",
            "messages": [{"role": "user", "content": "Which notes do I have?"}],
        },
        "ResponseBody": {"model": "nekro", "input": "Which notes do I have?", "user": "ada"},
    },
    operations={
        "cancel_response": {"answer": {JSON: {**_RESPONSE_ANSWER, "status": "cancelled"}}},
        "complete_chat": {
            "answer": {
                JSON: {
                    "id": _COMPLETION,
                    "object": "chat.completion",
                    "created": 1772442900,
                    "model": "nekro",
                    "choices": [
                        {
                            "index": 0,
                            "message": {"role": "assistant", "content": SPOKEN},
                            "finish_reason": "stop",
                        }
                    ],
                    "usage": {"prompt_tokens": 2140, "completion_tokens": 46, "total_tokens": 2186},
                },
                EVENT_STREAM: f'data: {{"id":"{_COMPLETION}","object":"chat.completion.chunk",'
                '"choices":[{"index":0,"delta":{"content":"You have "},"finish_reason":null}]}\n\n'
                "data: [DONE]\n\n",
            }
        },
        "create_response": {"answer": {JSON: _RESPONSE_ANSWER, EVENT_STREAM: _RESPONSE_EVENTS}},
        "delete_response": {"answer": {JSON: {"id": _RESPONSE, "object": "response", "deleted": True}}},
        "get_model": {"answer": {JSON: _MODEL}},
        "get_response": {"answer": {JSON: _RESPONSE_ANSWER, EVENT_STREAM: _RESPONSE_EVENTS}},
        "list_models": {"answer": {JSON: {"object": "list", "data": [_MODEL]}}},
    },
)
