"""Bodies of requests from arguments of methods: what is not stated is not sent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Literal

from pydantic import JsonValue

from nekro_client.models import (
    CallBody,
    DecisionBody,
    FileInfo,
    KeyBody,
    KeyScope,
    MessageBody,
    NewFilePart,
    NewImagePart,
    NewPart,
    NewTextPart,
    RunBody,
)

__all__ = ["approval_body", "call_body", "file_part", "key_body", "message_body", "run_body"]


def message_body(
    text: str | None,
    parts: Sequence[NewPart],
    user_id: str | None,
    user_name: str | None,
    to_agent: bool,
) -> MessageBody:
    """Return the body of a message; a text before parts becomes the first part."""
    content: dict[str, Any] = {"text": text}
    if parts:
        first = [] if text is None else [NewTextPart(text=text)]
        content = {"parts": [*first, *parts]}
    return MessageBody(**_stated(**content, user_id=user_id, user_name=user_name), to_agent=to_agent)


def call_body(
    method: str,
    args: Sequence[JsonValue],
    kwargs: Mapping[str, JsonValue] | None,
    chat_key: str,
    user_id: str | None,
    timeout_seconds: float | None,
) -> CallBody:
    """Return the body of a call."""
    optional = _stated(user_id=user_id, timeout_seconds=timeout_seconds)
    return CallBody(method=method, chat_key=chat_key, args=list(args), kwargs=dict(kwargs or {}), **optional)


def run_body(
    code: str, chat_key: str, user_id: str | None, follow_up: bool, timeout_seconds: float | None
) -> RunBody:
    """Return the body of a run."""
    optional = _stated(user_id=user_id, timeout_seconds=timeout_seconds)
    return RunBody(code=code, chat_key=chat_key, follow_up=follow_up, **optional)


def approval_body(
    scope: Literal["once", "turn", "chat"],
    reason: str | None,
    args: Sequence[JsonValue] | None,
    kwargs: Mapping[str, JsonValue] | None,
) -> DecisionBody:
    """Return the body that approves a call."""
    changed = _stated(args=None if args is None else [*args], kwargs=None if kwargs is None else dict(kwargs))
    return DecisionBody(decision="approve", scope=scope, **_stated(reason=reason), **changed)


def key_body(
    scopes: Sequence[KeyScope],
    name: str,
    chats: str,
    user_id: str | None,
    requests_per_minute: int | None,
    cost_per_day: float | None,
    tokens_per_day: int | None,
    expires_at: datetime | None,
) -> KeyBody:
    """Return the body that creates a key."""
    optional = _stated(
        user_id=user_id,
        requests_per_minute=requests_per_minute,
        cost_per_day=cost_per_day,
        tokens_per_day=tokens_per_day,
        expires_at=expires_at,
    )
    return KeyBody(scopes=[*scopes], name=name, chats=chats, **optional)


def file_part(file: FileInfo) -> NewPart:
    """Return the part of a message that shows an uploaded file."""
    kind = NewImagePart if file.media_type.startswith("image/") else NewFilePart
    return kind(type=kind.model_fields["type"].default, file_id=file.id)


def _stated(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}
