"""Examples of the OpenAPI document, from one made-up day: of parameters, bodies and answers.

Tests validate each of them against its model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from nekro.gateway.web.responses import EVENT_STREAM

__all__ = ["BY_MODEL", "BY_OPERATION", "PARAMETERS"]

_JSON: Final = "application/json"

_CHAT: Final = "web-1"
_MESSAGE: Final = "5b0c5b6f4f0e4dd58a2b8e6f0f6d3a11"
_TURN: Final = "8f14e45fceea467a9b1c0e2d7a5c4b36"
_ROUND: Final = "c9f0f895fb984b91b2f3d4a5e6c7b8a9"
_CALL: Final = "45c48cce2e2d4fbdba1fc6a4d2c1e0f7"
_JOB: Final = "d3d9446802a44259b5d6e7f8a9b0c1d2"
_APPROVAL: Final = "6512bd43d9caa6e02c990b0a82652dca"
_LETTER: Final = "c20ad4d76fe97759aa27a0c99bff6710"
_KEY: Final = "9bf31c7f"
_TIMER: Final = "aab3238922bcc25a6f606eb525ffdc56"
_WEBHOOK: Final = "70efdf2ec9b086079795c442636b55fb"
_DELIVERY: Final = "6f4922f45568161a8cdf4ad2299f6d23"
_REQUEST: Final = "1f0e3dad99908345f7439f8ffabdffc4"
_RESPONSE: Final = "resp_98f13708210194c475687be6106a3b84"
_WORKER: Final = "methods@host-1"
_PLUGIN: Final = "nekro.notes"
_DIGEST: Final = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"
_BEGUN, _ASKED, _ENDED = "2026-03-02T09:15:00Z", "2026-03-02T09:15:01Z", "2026-03-02T09:15:04Z"
_TOMORROW: Final = "2026-03-03T09:15:00Z"
_SPOKEN: Final = "You have one note: Shopping."
_CODE: Final = "notes = list_notes()\nsend_msg_text(_ck, f'You have one note: {notes[\"shop\"]}.')"

_FILE: Final = {
    "id": "NTU0MjpyZXBvcnQuY3N2",
    "name": "report.csv",
    "path": "/app/uploads/report.csv",
    "media_type": "text/csv",
    "size_bytes": 5120,
    "sha256": _DIGEST,
    "created_at": _BEGUN,
    "url": f"/api/v1/chats/{_CHAT}/files/NTU0MjpyZXBvcnQuY3N2",
}
_QUESTION: Final = {
    "id": _MESSAGE,
    "sequence": 17,
    "chat_key": _CHAT,
    "kind": "user",
    "sender_id": "ada",
    "sender_name": "Ada Lovelace",
    "text": "Which notes do I have?",
    "parts": [{"type": "text", "text": "Which notes do I have?"}],
    "turn_id": _TURN,
    "created_at": _BEGUN,
}
_ANSWER: Final = {
    "id": "9a1158154dfa42caddbd0694a4e9bdc8",
    "sequence": 18,
    "chat_key": _CHAT,
    "kind": "assistant",
    "text": _SPOKEN,
    "parts": [{"type": "text", "text": _SPOKEN}],
    "turn_id": _TURN,
    "round_id": _ROUND,
    "created_at": _ENDED,
}
_CAUSE: Final = {"kind": "message", "id": _MESSAGE}
_DONE_CALL: Final = {
    "id": _CALL,
    "method": "nekro.notes.list_notes",
    "type": "tool",
    "state": "done",
    "lane": "methods",
    "worker": _WORKER,
    "requested_at": _ASKED,
    "finished_at": _ENDED,
    "duration_ms": 3.2,
    "arguments": {"args": [], "kwargs": {}},
    "value": {"shop": "Shopping"},
}
_DONE_ROUND: Final = {
    "id": _ROUND,
    "turn_id": _TURN,
    "number": 1,
    "state": "done",
    "cause": _CAUSE,
    "attempt": 1,
    "worker": "rounds@host-1",
    "user_id": "ada",
    "requested_at": _BEGUN,
    "started_at": _ASKED,
    "finished_at": _ENDED,
    "model": "qwen3-32b",
    "prompt_tokens": 2140,
    "completion_tokens": 46,
    "cost": 0.0011,
    "code": _CODE,
    "stop_type": "NORMAL",
    "exit_code": 0,
    "calls": [_DONE_CALL],
}
_DONE_TURN: Final = {
    "id": _TURN,
    "chat_key": _CHAT,
    "state": "done",
    "cause": _CAUSE,
    "requested_at": _BEGUN,
    "started_at": _ASKED,
    "finished_at": _ENDED,
    "rounds": [_DONE_ROUND],
    "messages": [_QUESTION, _ANSWER],
}
_WEBHOOK_ROW: Final = {
    "id": _WEBHOOK,
    "url": "https://shop.example/hooks/nekro",
    "description": "Answers for the shop",
    "events": ["message.sent", "turn.ended"],
    "chats": "web-*",
    "is_active": True,
    "created_at": _BEGUN,
}
_KEY_ROW: Final = {
    "id": _KEY,
    "name": "shop",
    "scopes": ["read", "post"],
    "chats": "web-*",
    "requests_per_minute": 600,
    "cost_per_day": 5.0,
    "stored_bytes": 5120,
    "created_at": _BEGUN,
    "expires_at": "2027-03-02T00:00:00Z",
}
_WORK: Final = {"waiting": 1, "running": 2, "oldest_seconds": 4.5}
_STOPPED: Final = {"id": _ROUND, "number": 1, "state": "cancelled", "worker": "rounds@host-1"}
_DECLARATION: Final = {"command": "mcp-server-time", "args": ["--local-timezone", "UTC"]}
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
            "content": [{"type": "output_text", "text": _SPOKEN, "annotations": []}],
        }
    ],
    "usage": {"input_tokens": 2140, "output_tokens": 46, "total_tokens": 2186},
}
_COMPLETION: Final = f"chatcmpl-{_TURN}"
_CLIENT: Final = "c51ce410c124a10e0db5e4b97fc2af39"
_RESPONSE_EVENTS: Final = (
    'event: response.output_text.delta\ndata: {"type":"response.output_text.delta","sequence_number":4,'
    '"item_id":"msg_0","output_index":0,"content_index":0,"delta":"You have ","logprobs":[]}\n\n'
)
_EVENTS: Final = (
    "id: 17.5e0a92c1\nevent: message.sent\n"
    'data: {"number":17,"type":"message.sent","chat_key":"web-1","at":"2026-03-02T09:15:04Z","data":'
    '{"text":"You have one note: Shopping."}}\n\n'
)

#: Of parameters of paths, by name, or by tag and name.
PARAMETERS: Final[Mapping[str, Any]] = {
    "approval_id": _APPROVAL,
    "call_id": _CALL,
    "chat_key": _CHAT,
    "endpoint": "orders",
    "file_id": _FILE["id"],
    "files name": "report.csv",
    "job_id": _JOB,
    "key_id": _KEY,
    "letter_id": _LETTER,
    "mcp name": "time",
    "model": "nekro",
    "plugin_key": _PLUGIN,
    "response_id": _RESPONSE,
    "timer_id": _TIMER,
    "token": "eyJjIjoid2ViLTEifQ.c2lnbmF0dXJl",
    "turn_id": _TURN,
    "webhook_id": _WEBHOOK,
}

#: Of bodies and answers, by the name of their schema. A page of a list has the example of its items.
BY_MODEL: Final[Mapping[str, Any]] = {
    "Act": {
        "id": "eccbc87e4b5ce2fe28308fd9f2a7baf3",
        "at": _BEGUN,
        "action": "key.created",
        "subject": _KEY,
        "data": {"name": "shop"},
        "request_id": _REQUEST,
    },
    "AdapterAnswer": {"data": {"user_id": "42", "user_name": "Ada"}},
    "AdapterRequestBody": {"channel_id": "wx_42", "request": "get_user_info", "data": {"user_id": "42"}},
    "ApiKey": _KEY_ROW,
    "Approval": {
        "id": _APPROVAL,
        "number": 12,
        "call_id": _CALL,
        "chat_key": _CHAT,
        "turn_id": _TURN,
        "round_id": _ROUND,
        "user_id": "ada",
        "method": "Ada.shop.order",
        "summary": "order('carrots', amount=3)",
        "call": "order('carrots', amount=3)",
        "arguments": {"args": ["carrots"], "kwargs": {"amount": 3}},
        "digest": _DIGEST,
        "requested_at": _BEGUN,
        "expires_at": _TOMORROW,
        "state": "approved",
        "scope": "once",
        "decided_by": f"key:{_KEY}",
        "decided_at": _ENDED,
        "call_state": "queued",
    },
    "Call": _DONE_CALL,
    "CallBody": {
        "method": "save_note",
        "chat_key": _CHAT,
        "user_id": "ada",
        "args": ["shop", "Shopping", "milk"],
    },
    "ChatBody": {"title": "Shopping"},
    "ChatSummary": {
        "chat_key": _CHAT,
        "adapter": "web",
        "title": "Shopping",
        "type": "private",
        "created_at": _BEGUN,
        "active_at": _ENDED,
        "last_event": 42,
        "last_message": {
            "id": _ANSWER["id"],
            "kind": "assistant",
            "text": _SPOKEN,
            "created_at": _ENDED,
        },
    },
    "Command": {
        "name": "weather",
        "full_name": "Ada.weather:weather",
        "permission": "public",
        "usage": "weather <place> [days]",
        "description": "Weather",
    },
    "CommandBody": {"chat_key": _CHAT, "line": "/weather Tokyo", "user_id": "ada"},
    "CommandResult": {
        "status": "success",
        "responses": [{"status": "success", "message": "1 days of rain in Tokyo"}],
    },
    "CompletionBody": {
        "model": "nekro",
        "user": "ada",
        "messages": [{"role": "user", "content": "Which notes do I have?"}],
    },
    "ConsoleLogin": {"key": "nk_9bf31c7f_…"},
    "ConsoleSession": {
        "key_id": _KEY,
        "name": "shop",
        "scopes": ["read", "post"],
        "chats": "web-*",
        "user_id": None,
        "csrf_token": "wQ0t7n1mGk3r",
        "expires_at": _TOMORROW,
    },
    "Costs": {
        "items": [
            {
                "key": "2026-03-02",
                "rounds": 120,
                "requests": 124,
                "estimated_requests": 2,
                "prompt_tokens": 256800,
                "completion_tokens": 5520,
                "cost": 0.13,
                "sandbox_seconds": 18.4,
            }
        ],
        "next_cursor": None,
        "budgets": [
            {
                "scope": "key",
                "id": _KEY,
                "measure": "cost",
                "period": "2026-03-02",
                "limit": 5.0,
                "used": 0.13,
                "renews_at": "2026-03-03T00:00:00Z",
                "state": "ok",
            }
        ],
    },
    "CreatedKey": {**_KEY_ROW, "key": "nk_9bf31c7f_…"},
    "DeadLetter": {
        "id": _LETTER,
        "task": "Ada.shop.order",
        "lane": "methods",
        "source": "broker",
        "reason": "delivered 5 times, and each time its worker died",
        "deliveries": 5,
        "bytes": 812,
        "chat_key": _CHAT,
    },
    "DecisionBody": {"decision": "approve", "scope": "once"},
    "FileInfo": _FILE,
    "GivenTitle": {"chat_key": _CHAT, "title": "Shopping"},
    "JobLog": {
        "attempts": [
            {
                "number": 1,
                "worker": "long@host-1",
                "started_at": _BEGUN,
                "ended_at": _ENDED,
                "outcome": "failed",
                "message": "the printer is off",
                "last_at": _ENDED,
            }
        ],
        "entries": [
            {"at": _BEGUN, "kind": "started", "attempt": 1, "worker": "long@host-1", "text": ""},
            {"at": _ASKED, "kind": "line", "attempt": 1, "level": "WARNING", "text": "no answer yet"},
            {"at": _ASKED, "kind": "report", "attempt": 1, "percent": 40, "text": "page 4 of 10"},
            {"at": _ENDED, "kind": "failed", "attempt": 1, "text": "the printer is off"},
        ],
    },
    "Series": {
        "interval": "hour",
        "since": "2026-03-02T09:00:00Z",
        "until": _ENDED,
        "complete_since": None,
        "points": [
            {
                "begins_at": "2026-03-02T09:00:00Z",
                "turns": 40,
                "failed": 1,
                "cancelled": 0,
                "turn_p50_ms": 3100,
                "turn_p95_ms": 9400,
                "requests": 44,
                "prompt_tokens": 85600,
                "completion_tokens": 1840,
                "cost": 0.04,
            }
        ],
    },
    "Job": {
        "id": _JOB,
        "type": "haul",
        "plugin": "Ada.shop",
        "chat_key": _CHAT,
        "state": "running",
        "percent": 50,
        "message": "half way",
        "attempt": 1,
        "worker": "long@host-1",
        "created_at": _BEGUN,
        "started_at": _ASKED,
        "updated_at": _ENDED,
    },
    "KeyBody": {"name": "shop", "scopes": ["read", "post"], "chats": "web-*", "cost_per_day": 5.0},
    "McpServer": {
        "name": "time",
        "plugin": "mcp.time",
        "status": "ok",
        "source": "database",
        "transport": "stdio",
        "declaration": _DECLARATION,
        "tools": ["get_current_time", "convert_time"],
        "server": "mcp-time 1.0.0",
        "protocol": "2025-11-25",
        "listed_at": _BEGUN,
    },
    "McpServerBody": {"declaration": _DECLARATION},
    "McpTrial": {
        "name": "time",
        "plugin": "mcp.time",
        "error": None,
        "about": {"name": "mcp-time", "version": "1.0.0"},
        "confinement": None,
        "tools": [
            {
                "name": "get_current_time",
                "method": "mcp.time.get_current_time",
                "signature": "(timezone: str) -> str",
                "requires_approval": False,
                "runs_once": False,
            }
        ],
    },
    "Message": _ANSWER,
    "Method": {
        "name": "save_note",
        "task": "nekro.notes.save_note",
        "plugin": _PLUGIN,
        "type": "tool",
        "lane": "methods",
        "signature": "(note_id: str, title: str, text: str) -> str",
        "doc": "Save a note of the user.",
    },
    "NewWebhook": {**_WEBHOOK_ROW, "secret": "whsec_…"},
    "Plugin": {
        "key": _PLUGIN,
        "status": "ok",
        "name": "Notes",
        "description": "Keep short notes per user.",
        "version": "1.0.0",
        "author": "nekro",
        "versions": [
            {
                "version": "1.0.0",
                "status": "ok",
                "methods": 3,
                "published_at": _BEGUN,
                "workers": [_WORKER],
            }
        ],
    },
    "PluginConfig": {
        "schema": {"type": "object", "properties": {"MAX_NOTES": {"type": "integer", "default": 100}}},
        "values": {"MAX_NOTES": 100},
        "secrets": {},
    },
    "PluginConfigBody": {"values": {"MAX_NOTES": 200}},
    "PluginState": {"key": _PLUGIN, "is_enabled": True, "is_changed": True},
    "PostedMessage": {"message": _QUESTION, "turn_id": _TURN, "turn": None},
    "Problem": {
        "type": "about:blank",
        "title": "Not Found",
        "status": 404,
        "detail": "there is no such thing",
        "code": "not_found",
        "request_id": _REQUEST,
    },
    "Queues": {
        "queues": [{"lane": "methods", "waiting": 3, "held": 8, "oldest_seconds": 0.4}],
        "rounds": _WORK,
        "jobs": _WORK,
        "dead_letters": 0,
    },
    "ReplayBody": {"delivery_id": _DELIVERY},
    "ReplayTurnBody": {"chat_key": "web-1-again"},
    "Replayed": {"count": 1},
    "ReplayedTurn": {
        "chat_key": "web-1-again",
        "message": {**_QUESTION, "chat_key": "web-1-again"},
        "turn_id": _TURN,
    },
    "Reset": {"cancelled": [], "stopped": [_STOPPED], "still_running": []},
    "ResponseBody": {"model": "nekro", "input": "Which notes do I have?", "user": "ada"},
    "RetryBody": {"timeout_seconds": 60},
    "Round": _DONE_ROUND,
    "Run": {
        "id": _CALL,
        "stop_type": "NORMAL",
        "exit_code": 0,
        "output": "{'shop': 'Shopping'}\n",
        "calls": [_DONE_CALL],
    },
    "RunBody": {"code": "print(list_notes())", "chat_key": _CHAT, "user_id": "ada"},
    "SignalBody": {"key": "paid", "data": {"order": 42}},
    "StreamTicket": {
        "ticket": "kt3Vd0kQ",
        "path": f"/api/v1/chats/{_CHAT}/events?ticket=kt3Vd0kQ",
        "expires_at": _ENDED,
    },
    "StreamTicketBody": {"chat_key": _CHAT},
    "Timer": {
        "id": _TIMER,
        "kind": "once",
        "chat_key": _CHAT,
        "state": "waiting",
        "fires_at": _TOMORROW,
        "description": "Look into the oven",
    },
    "TimerBody": {"state": "paused"},
    "Turn": _DONE_TURN,
    "TurnSummary": {
        "id": _TURN,
        "chat_key": _CHAT,
        "state": "done",
        "cause": _CAUSE,
        "text": _QUESTION["text"],
        "user_id": "ada",
        "requested_at": _BEGUN,
        "started_at": _ASKED,
        "finished_at": _ENDED,
        "rounds": 1,
        "models": ["qwen3-32b"],
        "prompt_tokens": 2140,
        "completion_tokens": 46,
        "cost": 0.0011,
    },
    "Webhook": _WEBHOOK_ROW,
    "WebhookAnswer": {
        "success": True,
        "message": "1 webhooks returned, 0 failed",
        "data": {"results": [{"plugin_key": "Ada.shop", "result": "thanks"}], "errors": []},
    },
    "WebhookBody": {
        "url": _WEBHOOK_ROW["url"],
        "events": _WEBHOOK_ROW["events"],
        "chats": "web-*",
        "description": _WEBHOOK_ROW["description"],
    },
    "WebhookChange": {"is_active": True},
    "WebhookDelivery": {
        "id": _DELIVERY,
        "chat_key": _CHAT,
        "event_number": 42,
        "type": "message.sent",
        "state": "done",
        "attempts": 1,
        "status": 200,
        "created_at": _BEGUN,
        "finished_at": _ENDED,
    },
    "Worker": {
        "id": "1679091c5a880faf6fb5e6087eb1b2dc",
        "name": _WORKER,
        "lane": "methods",
        "host": "host-1",
        "pid": 4711,
        "started_at": _BEGUN,
        "is_live": True,
        "lease_until": _ENDED,
        "running_calls": 2,
    },
}

#: Of operations whose bodies and answers have no schema of their own, by id and type.
BY_OPERATION: Final[Mapping[str, Mapping[str, Mapping[str, Any]]]] = {
    "cancel_response": {"answer": {_JSON: {**_RESPONSE_ANSWER, "status": "cancelled"}}},
    "complete_chat": {
        "answer": {
            _JSON: {
                "id": _COMPLETION,
                "object": "chat.completion",
                "created": 1772442900,
                "model": "nekro",
                "choices": [
                    {
                        "index": 0,
                        "message": {"role": "assistant", "content": _SPOKEN},
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
    "connect_adapter": {
        "answer": {
            EVENT_STREAM: f'event: connected\ndata: {{"client_id":"{_CLIENT}","timestamp":1772442900}}\n\n'
        }
    },
    "create_response": {"answer": {_JSON: _RESPONSE_ANSWER, EVENT_STREAM: _RESPONSE_EVENTS}},
    "delete_response": {"answer": {_JSON: {"id": _RESPONSE, "object": "response", "deleted": True}}},
    "get_health": {"answer": {_JSON: {"ok": True}}},
    "get_metrics": {"answer": {"text/plain": "nekro_http_requests_total 42.0\n"}},
    "get_model": {"answer": {_JSON: _MODEL}},
    "get_readiness": {"answer": {_JSON: {"ok": True}}},
    "get_response": {"answer": {_JSON: _RESPONSE_ANSWER, EVENT_STREAM: _RESPONSE_EVENTS}},
    "list_models": {"answer": {_JSON: {"object": "list", "data": [_MODEL]}}},
    "post_files": {"answer": {_JSON: [_FILE]}},
    "post_message": {"body": {_JSON: {"text": _QUESTION["text"], "user_id": "ada"}}},
    "read_changes": {
        "answer": {EVENT_STREAM: f'event: change\ndata: {{"kind":"turns","chat_key":"{_CHAT}"}}\n\n'}
    },
    "read_events": {"answer": {EVENT_STREAM: _EVENTS}},
    "receive_webhook": {"body": {_JSON: {"order": 42, "state": "paid"}}},
    "run_code": {
        "answer": {
            EVENT_STREAM: 'event: output.chunk\ndata: {"data":{"text":"milk\\n","offset":0}}\n\n'
            f'event: run.ended\ndata: {{"id":"{_CALL}","stop_type":"NORMAL","output":"milk\\n"}}\n\n'
        }
    },
    "send_adapter_command": {
        "body": {_JSON: {"cmd": "register", "platform": "wx", "client_name": "shop", "client_version": "1"}},
        "answer": {_JSON: {"client_id": _CLIENT, "message": "client shop is registered"}},
    },
}
