"""The message model that plugins of the reference query."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, Self

from nekro_agent import runtime
from nekro_agent.models.base import MAX_ROWS, QueryModel
from nekro_agent.ports import MessageKind, StoredMessage

__all__ = ["DBChatMessage"]

#: Sender ids that the reference assigns to the agent and to the system.
_SENDERS = {MessageKind.ASSISTANT: "-1", MessageKind.SYSTEM: "0"}


class DBChatMessage(QueryModel):
    """One recorded message."""

    id: int
    message_id: str
    chat_key: str
    adapter_key: str = ""
    sender_id: str
    platform_userid: str
    sender_name: str
    sender_nickname: str
    content_text: str
    #: Seconds since the epoch.
    send_timestamp: int
    create_time: datetime
    is_recalled: bool = False

    @classmethod
    async def _load(cls, equal: dict[str, Any]) -> list[Self]:
        after = [equal[name] for name in ("send_timestamp__gte", "send_timestamp__gt") if name in equal]
        since = datetime.fromtimestamp(int(after[0]), UTC) if after else None
        records = runtime.current().service("records")
        rows = await records.messages(chat_key=equal.get("chat_key"), since=since, limit=MAX_ROWS)
        return [cls._of(row) for row in rows]

    @classmethod
    def _of(cls, row: StoredMessage) -> Self:
        sender_id = _SENDERS.get(row.kind, row.sender_id or "")
        return cls(
            id=row.sequence,
            message_id=row.id,
            chat_key=row.chat_key,
            adapter_key=row.adapter_key or "",
            sender_id=sender_id,
            platform_userid=row.sender_id or sender_id,
            sender_name=row.sender_name or "",
            sender_nickname=row.sender_name or "",
            content_text=row.text,
            send_timestamp=int(row.created_at.timestamp()),
            create_time=row.created_at,
        )
