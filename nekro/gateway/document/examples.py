"""Examples of the OpenAPI document, from one made-up day: of parameters, bodies and answers.

Those of extensions are beside their routes. Tests validate each example against its model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from nekro.gateway.web.responses import EVENT_STREAM

__all__ = ["BEGUN", "CHAT", "ENDED", "EXAMPLES", "JSON", "NO_EXAMPLES", "SPOKEN", "TURN", "Examples"]


@dataclass(frozen=True, kw_only=True)
class Examples:
    """Examples of a part of the API."""

    #: Of parameters of paths, by name, or by tag and name.
    parameters: Mapping[str, Any] = field(default_factory=dict)
    #: Of bodies and answers, by the name of their schema. A page of a list has the example of its items.
    models: Mapping[str, Any] = field(default_factory=dict)
    #: Of operations whose bodies and answers have no schema of their own, by id and type.
    operations: Mapping[str, Mapping[str, Mapping[str, Any]]] = field(default_factory=dict)

    def __or__(self, other: Examples) -> Examples:
        """Return these and others."""
        return Examples(
            parameters={**self.parameters, **other.parameters},
            models={**self.models, **other.models},
            operations={**self.operations, **other.operations},
        )


NO_EXAMPLES: Final = Examples()

JSON: Final = "application/json"

CHAT: Final = "web-1"
_MESSAGE: Final = "5b0c5b6f4f0e4dd58a2b8e6f0f6d3a11"
TURN: Final = "8f14e45fceea467a9b1c0e2d7a5c4b36"
_ROUND: Final = "c9f0f895fb984b91b2f3d4a5e6c7b8a9"
_CALL: Final = "45c48cce2e2d4fbdba1fc6a4d2c1e0f7"
_JOB: Final = "d3d9446802a44259b5d6e7f8a9b0c1d2"
_APPROVAL: Final = "6512bd43d9caa6e02c990b0a82652dca"
_LETTER: Final = "c20ad4d76fe97759aa27a0c99bff6710"
_KEY: Final = "9bf31c7f"
_TIMER: Final = "aab3238922bcc25a6f606eb525ffdc56"
_REQUEST: Final = "1f0e3dad99908345f7439f8ffabdffc4"
_WORKER: Final = "methods@host-1"
_PLUGIN: Final = "nekro.notes"
_DIGEST: Final = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"
BEGUN, _ASKED, ENDED = "2026-03-02T09:15:00Z", "2026-03-02T09:15:01Z", "2026-03-02T09:15:04Z"
_TOMORROW: Final = "2026-03-03T09:15:00Z"
SPOKEN: Final = "You have one note: Shopping."
_CODE: Final = "notes = list_notes()\nsend_msg_text(_ck, f'You have one note: {notes[\"shop\"]}.')"

_FILE: Final = {
    "id": "NTU0MjpyZXBvcnQuY3N2",
    "name": "report.csv",
    "path": "/app/uploads/report.csv",
    "media_type": "text/csv",
    "size_bytes": 5120,
    "sha256": _DIGEST,
    "created_at": BEGUN,
    "url": f"/api/v1/chats/{CHAT}/files/NTU0MjpyZXBvcnQuY3N2",
}
_QUESTION: Final = {
    "id": _MESSAGE,
    "sequence": 17,
    "chat_key": CHAT,
    "kind": "user",
    "sender_id": "ada",
    "sender_name": "Ada Lovelace",
    "text": "Which notes do I have?",
    "parts": [{"type": "text", "text": "Which notes do I have?"}],
    "turn_id": TURN,
    "created_at": BEGUN,
}
_ANSWER: Final = {
    "id": "9a1158154dfa42caddbd0694a4e9bdc8",
    "sequence": 18,
    "chat_key": CHAT,
    "kind": "assistant",
    "text": SPOKEN,
    "parts": [{"type": "text", "text": SPOKEN}],
    "turn_id": TURN,
    "round_id": _ROUND,
    "created_at": ENDED,
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
    "finished_at": ENDED,
    "duration_ms": 3.2,
    "arguments": {"args": [], "kwargs": {}},
    "value": {"shop": "Shopping"},
}
_DONE_ROUND: Final = {
    "id": _ROUND,
    "turn_id": TURN,
    "number": 1,
    "state": "done",
    "cause": _CAUSE,
    "attempt": 1,
    "worker": "rounds@host-1",
    "user_id": "ada",
    "requested_at": BEGUN,
    "started_at": _ASKED,
    "finished_at": ENDED,
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
    "id": TURN,
    "chat_key": CHAT,
    "state": "done",
    "cause": _CAUSE,
    "requested_at": BEGUN,
    "started_at": _ASKED,
    "finished_at": ENDED,
    "rounds": [_DONE_ROUND],
    "messages": [_QUESTION, _ANSWER],
}
_KEY_ROW: Final = {
    "id": _KEY,
    "name": "shop",
    "scopes": ["read", "post"],
    "chats": "web-*",
    "requests_per_minute": 600,
    "cost_per_day": 5.0,
    "stored_bytes": 5120,
    "created_at": BEGUN,
    "expires_at": "2027-03-02T00:00:00Z",
}
_WORK: Final = {"waiting": 1, "running": 2, "oldest_seconds": 4.5}
_STOPPED: Final = {"id": _ROUND, "number": 1, "state": "cancelled", "worker": "rounds@host-1"}
_EVENTS: Final = (
    "id: 17.5e0a92c1\nevent: message.sent\n"
    'data: {"number":17,"type":"message.sent","chat_key":"web-1","at":"2026-03-02T09:15:04Z","data":'
    '{"text":"You have one note: Shopping."}}\n\n'
)

_PARAMETERS: Final[Mapping[str, Any]] = {
    "approval_id": _APPROVAL,
    "call_id": _CALL,
    "catalogue name": f"{_PLUGIN}.save_note",
    "chat_key": CHAT,
    "file_id": _FILE["id"],
    "files name": "report.csv",
    "job_id": _JOB,
    "key_id": _KEY,
    "letter_id": _LETTER,
    "plugin_key": _PLUGIN,
    "timer_id": _TIMER,
    "token": "eyJjIjoid2ViLTEifQ.c2lnbmF0dXJl",
    "turn_id": TURN,
}

_MODELS: Final[Mapping[str, Any]] = {
    "Act": {
        "id": "eccbc87e4b5ce2fe28308fd9f2a7baf3",
        "at": BEGUN,
        "action": "key.created",
        "subject": _KEY,
        "data": {"name": "shop"},
        "request_id": _REQUEST,
    },
    "ApiKey": _KEY_ROW,
    "Approval": {
        "id": _APPROVAL,
        "number": 12,
        "call_id": _CALL,
        "chat_key": CHAT,
        "turn_id": TURN,
        "round_id": _ROUND,
        "user_id": "ada",
        "method": "Ada.shop.order",
        "summary": "order('carrots', amount=3)",
        "call": "order('carrots', amount=3)",
        "arguments": {"args": ["carrots"], "kwargs": {"amount": 3}},
        "digest": _DIGEST,
        "requested_at": BEGUN,
        "expires_at": _TOMORROW,
        "state": "approved",
        "scope": "once",
        "decided_by": f"key:{_KEY}",
        "decided_at": ENDED,
        "call_state": "queued",
    },
    "Call": _DONE_CALL,
    "CallBody": {
        "method": "save_note",
        "chat_key": CHAT,
        "user_id": "ada",
        "args": ["shop", "Shopping", "milk"],
    },
    "CatalogueState": {"is_live": True},
    "ChatBody": {"title": "Shopping"},
    "ChatPlugin": {
        "key": _PLUGIN,
        "name": "Notes",
        "is_awake": True,
        "turns_left": 5,
        "brief": "Keeps short notes per user.",
    },
    "ChatPluginBody": {"is_awake": True, "turns": 5},
    "ChatPluginState": {"key": _PLUGIN, "is_awake": True, "is_changed": True},
    "ChatSummary": {
        "chat_key": CHAT,
        "adapter": "web",
        "title": "Shopping",
        "type": "private",
        "created_at": BEGUN,
        "active_at": ENDED,
        "last_event": 42,
        "last_message": {
            "id": _ANSWER["id"],
            "kind": "assistant",
            "text": SPOKEN,
            "created_at": ENDED,
        },
    },
    "Command": {
        "name": "weather",
        "full_name": "Ada.weather:weather",
        "permission": "public",
        "usage": "weather <place> [days]",
        "description": "Weather",
    },
    "CommandBody": {"chat_key": CHAT, "line": "/weather Tokyo", "user_id": "ada"},
    "CommandResult": {
        "status": "success",
        "responses": [{"status": "success", "message": "1 days of rain in Tokyo"}],
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
        "chat_key": CHAT,
    },
    "DecisionBody": {"decision": "approve", "scope": "once"},
    "FileInfo": _FILE,
    "GivenTitle": {"chat_key": CHAT, "title": "Shopping"},
    "JobLog": {
        "attempts": [
            {
                "number": 1,
                "worker": "long@host-1",
                "started_at": BEGUN,
                "ended_at": ENDED,
                "outcome": "failed",
                "message": "the printer is off",
                "last_at": ENDED,
            }
        ],
        "entries": [
            {"at": BEGUN, "kind": "started", "attempt": 1, "worker": "long@host-1", "text": ""},
            {"at": _ASKED, "kind": "line", "attempt": 1, "level": "WARNING", "text": "no answer yet"},
            {"at": _ASKED, "kind": "report", "attempt": 1, "percent": 40, "text": "page 4 of 10"},
            {"at": ENDED, "kind": "failed", "attempt": 1, "text": "the printer is off"},
        ],
    },
    "Series": {
        "interval": "hour",
        "since": "2026-03-02T09:00:00Z",
        "until": ENDED,
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
        "chat_key": CHAT,
        "state": "running",
        "percent": 50,
        "message": "half way",
        "attempt": 1,
        "worker": "long@host-1",
        "created_at": BEGUN,
        "started_at": _ASKED,
        "updated_at": ENDED,
    },
    "KeyBody": {"name": "shop", "scopes": ["read", "post"], "chats": "web-*", "cost_per_day": 5.0},
    "LaneBody": {"lane": "long"},
    "LaneState": {"name": f"{_PLUGIN}.save_note", "lane": "long", "is_changed": True},
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
                "published_at": BEGUN,
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
    "PostedMessage": {"message": _QUESTION, "turn_id": TURN, "turn": None},
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
        "programs": {"waiting": 2, "running": 0, "oldest_seconds": 3600.0},
        "dead_letters": 0,
        "brokers": [{"name": "redis://redis:6379/0", "is_up": True, "is_drained": False, "messages": 11}],
    },
    "ReplayTurnBody": {"chat_key": "web-1-again"},
    "ReplayedTurn": {
        "chat_key": "web-1-again",
        "message": {**_QUESTION, "chat_key": "web-1-again"},
        "turn_id": TURN,
    },
    "Reset": {"cancelled": [], "stopped": [_STOPPED], "still_running": [], "waits": []},
    "RetryBody": {"timeout_seconds": 60},
    "Round": _DONE_ROUND,
    "Run": {
        "id": _CALL,
        "stop_type": "NORMAL",
        "exit_code": 0,
        "output": "{'shop': 'Shopping'}\n",
        "calls": [_DONE_CALL],
    },
    "RunBody": {"code": "print(list_notes())", "chat_key": CHAT, "user_id": "ada"},
    "SignalBody": {"key": "paid", "data": {"order": 42}},
    "StreamTicket": {
        "ticket": "kt3Vd0kQ",
        "path": f"/api/v1/chats/{CHAT}/events?ticket=kt3Vd0kQ",
        "expires_at": ENDED,
    },
    "StreamTicketBody": {"chat_key": CHAT},
    "Summary": {
        "chat_key": CHAT,
        "version": 2,
        "up_to": 16,
        "oldest_at": BEGUN,
        "newest_at": BEGUN,
        "text": "Ada keeps a shopping list.",
        "group": "default",
        "model": "qwen3-32b",
        "prompt_tokens": 1810,
        "answer_tokens": 64,
        "cost": 0.0008,
        "created_at": ENDED,
    },
    "Timer": {
        "id": _TIMER,
        "kind": "once",
        "chat_key": CHAT,
        "state": "waiting",
        "fires_at": _TOMORROW,
        "description": "Look into the oven",
    },
    "TimerBody": {"state": "paused"},
    "Turn": _DONE_TURN,
    "TurnSummary": {
        "id": TURN,
        "chat_key": CHAT,
        "state": "done",
        "cause": _CAUSE,
        "text": _QUESTION["text"],
        "user_id": "ada",
        "requested_at": BEGUN,
        "started_at": _ASKED,
        "finished_at": ENDED,
        "rounds": 1,
        "models": ["qwen3-32b"],
        "prompt_tokens": 2140,
        "completion_tokens": 46,
        "cost": 0.0011,
    },
    "Worker": {
        "id": "1679091c5a880faf6fb5e6087eb1b2dc",
        "name": _WORKER,
        "lane": "methods",
        "host": "host-1",
        "pid": 4711,
        "started_at": BEGUN,
        "is_live": True,
        "lease_until": ENDED,
        "running_calls": 2,
    },
}

_OPERATIONS: Final[Mapping[str, Mapping[str, Mapping[str, Any]]]] = {
    "get_health": {"answer": {JSON: {"ok": True}}},
    "get_metrics": {"answer": {"text/plain": "nekro_http_requests_total 42.0\n"}},
    "get_readiness": {"answer": {JSON: {"ok": True}}},
    "post_files": {"answer": {JSON: [_FILE]}},
    "post_message": {"body": {JSON: {"text": _QUESTION["text"], "user_id": "ada"}}},
    "read_changes": {
        "answer": {EVENT_STREAM: f'event: change\ndata: {{"kind":"turns","chat_key":"{CHAT}"}}\n\n'}
    },
    "read_events": {"answer": {EVENT_STREAM: _EVENTS}},
    "run_code": {
        "answer": {
            EVENT_STREAM: 'event: output.chunk\ndata: {"data":{"text":"milk\\n","offset":0}}\n\n'
            f'event: run.ended\ndata: {{"id":"{_CALL}","stop_type":"NORMAL","output":"milk\\n"}}\n\n'
        }
    },
}

EXAMPLES: Final = Examples(parameters=_PARAMETERS, models=_MODELS, operations=_OPERATIONS)
