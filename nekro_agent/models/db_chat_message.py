"""The message model that plugins of the reference query."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import PurePosixPath
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, PrivateAttr, field_validator

from nekro_agent import runtime
from nekro_agent.errors import InvalidValueError
from nekro_agent.models.base import MAX_ROWS, QueryModel
from nekro_agent.ports import MessageKind
from nekro_agent.records import StoredMessage
from nekro_agent.schemas.chat_message import (
    ChatMessageSegment,
    ChatType,
    locate_files,
    segments_from_list,
)

__all__ = ["DBChatMessage", "PlatformMessageExt"]

#: Sender ids that the reference assigns to the agent and to the system.
_SENDERS = {MessageKind.ASSISTANT: "-1", MessageKind.SYSTEM: "0"}
#: Fields that are kept in the message's data.
_DATA = ("is_tome", "is_recalled", "content_data", "ext_data", "raw_cq_code")
_JSON = ("content_data", "ext_data")


class PlatformMessageExt(BaseModel):
    """What a platform says about a message besides its content."""

    model_config = ConfigDict(extra="allow")

    ref_chat_key: str = ""
    ref_msg_id: str = ""
    ref_sender_id: str = ""


class DBChatMessage(QueryModel):
    """One recorded message; a deleted one is no longer in prompts."""

    _changeable = frozenset(("content_text", "sender_name", *_DATA))

    id: int = 0
    message_id: str = ""
    chat_key: str
    chat_type: str = ""
    adapter_key: str = ""
    #: ``-1`` is the agent, ``0`` the system.
    sender_id: str = ""
    platform_userid: str = ""
    sender_name: str = ""
    sender_nickname: str = ""
    #: 1 if the message is to the agent.
    is_tome: int = 0
    is_recalled: bool = False
    content_text: str = ""
    #: JSON list of segments.
    content_data: str = "[]"
    raw_cq_code: str = ""
    #: JSON object.
    ext_data: str = "{}"
    #: Seconds since the epoch.
    send_timestamp: int = 0
    create_time: datetime | None = None
    update_time: datetime | None = None

    @field_validator("content_data", "ext_data", mode="before")
    @classmethod
    def _as_json(cls, value: Any) -> Any:
        """Accept the values themselves, which some plugins pass instead of JSON texts."""
        return json.dumps(value, ensure_ascii=False) if isinstance(value, dict | list) else value

    #: Id of the row; ``message_id`` may be the platform's.
    _row_id: str = PrivateAttr("")
    _extra: dict[str, Any] = PrivateAttr(default_factory=dict)

    @property
    def is_system(self) -> bool:
        """Whether it is a notice of the system."""
        return self.sender_id == _SENDERS[MessageKind.SYSTEM]

    @property
    def ext_data_obj(self) -> PlatformMessageExt:
        """``ext_data`` as an object; empty if it is not valid."""
        try:
            return PlatformMessageExt.model_validate(json.loads(self.ext_data or "{}"))
        except ValueError:
            return PlatformMessageExt()

    def parse_content_data(self) -> list[ChatMessageSegment]:
        """Return the segments of the content; files have their path on this host if they are uploads.

        Raises:
            InvalidValueError: ``content_data`` is not a JSON list of segments.
        """
        try:
            parsed = json.loads(self.content_data or "[]")
        except ValueError as exc:
            raise InvalidValueError(f"content_data of message {self.message_id} is not JSON: {exc}") from exc
        segments = segments_from_list(parsed)
        unknown = (segment for segment in segments if not getattr(segment, "local_path", None))
        locate_files(unknown, chat_key=self.chat_key)
        return segments

    def parse_chat_history_prompt(
        self, one_time_code: str = "", config: Any = None, ref_mode: bool = False
    ) -> str:
        """Return the message as one line of a history: time, sender and text.

        Args:
            one_time_code: accepted for compatibility, not used; our prompts protect their own tags.
            ref_mode: whether the line begins with the message's id.
        """
        time = datetime.fromtimestamp(self.send_timestamp, UTC).strftime("%m-%d %H:%M:%S")
        prefix = f"(msg_id:{self.message_id})" if ref_mode else ""
        return f'{prefix}[{time} id:{self.platform_userid}] "{self.sender_nickname}": {self.content_text}'

    @classmethod
    async def _load(cls, equal: dict[str, Any]) -> list[Self]:
        after = [equal[name] for name in ("send_timestamp__gte", "send_timestamp__gt") if name in equal]
        since = datetime.fromtimestamp(int(after[0]), UTC) if after else None
        records = runtime.current().service("records")
        rows = await records.messages(chat_key=equal.get("chat_key"), since=since, limit=MAX_ROWS)
        return [cls._of_message(row) for row in rows]

    @classmethod
    def _of_message(cls, row: StoredMessage) -> Self:
        sender_id = _SENDERS.get(row.kind, row.sender_id or "")
        data = dict(row.data or {})
        name = row.sender_name or ("SYSTEM" if row.kind is MessageKind.SYSTEM else "")
        content = data["content_data"] if "content_data" in data else _segments(row, data)
        message = cls(
            id=row.sequence,
            message_id=data.get("message_id") or row.id,
            chat_key=row.chat_key,
            chat_type=ChatType.of(row.channel_type).value,
            adapter_key=row.adapter_key or "",
            sender_id=sender_id,
            platform_userid=row.sender_id or sender_id,
            sender_name=name,
            sender_nickname=data.get("sender_nickname") or name,
            is_tome=int(data.get("is_tome", row.kind is MessageKind.USER)),
            is_recalled=bool(data.get("is_recalled", False)),
            content_text=row.text,
            content_data=json.dumps(content, ensure_ascii=False),
            raw_cq_code=data.get("raw_cq_code", ""),
            ext_data=json.dumps(data.get("ext_data", {}), ensure_ascii=False),
            send_timestamp=int(row.created_at.timestamp()),
            create_time=row.created_at,
            update_time=row.created_at,
        )
        message._row_id, message._extra = row.id, data
        message._keep()
        return message

    async def _insert(self) -> Self:
        kinds = {"-1": MessageKind.ASSISTANT, "0": MessageKind.SYSTEM}
        kind = kinds.get(self.sender_id, MessageKind.USER)
        if kind is MessageKind.ASSISTANT and self.sender_name == "SYSTEM":
            kind = MessageKind.SYSTEM
        given = self.model_fields_set
        data = self._data({name: getattr(self, name) for name in _DATA if name in given})
        data |= {name: getattr(self, name) for name in ("message_id", "sender_nickname") if name in given}
        if kind is MessageKind.USER:
            data["is_tome"] = self.is_tome
        if kind is MessageKind.ASSISTANT:
            data["is_posted"] = True  # the plugin records what people have seen already
        row = (
            await runtime.current()
            .service("records")
            .add_message(
                self.chat_key,
                kind=kind,
                text=self.content_text,
                sender_id=self.platform_userid or self.sender_id if kind is MessageKind.USER else None,
                sender_name=self.sender_name or None,
                data=data,
            )
        )
        return self._of_message(row)

    async def _update(self, changes: dict[str, Any]) -> None:
        values: dict[str, Any] = {}
        if "content_text" in changes:
            values["text"] = changes["content_text"]
        if "sender_name" in changes:
            values["sender_name"] = changes["sender_name"]
        if set(_DATA) & changes.keys():
            self._extra |= self._data({name: changes[name] for name in _DATA if name in changes})
            values["data"] = self._extra
        await runtime.current().service("records").change_message(self._row_id, values)

    async def _remove(self) -> bool:
        return await runtime.current().service("records").delete_message(self._row_id)

    @staticmethod
    def _data(fields: dict[str, Any]) -> dict[str, Any]:
        """Return fields in the form of the message's data."""
        try:
            return {
                name: json.loads(value or "null") if name in _JSON and isinstance(value, str) else value
                for name, value in fields.items()
            }
        except ValueError as exc:
            raise InvalidValueError(f"content_data and ext_data must be JSON: {exc}") from exc


def _segments(row: StoredMessage, data: dict[str, Any]) -> list[dict[str, Any]]:
    """The content of a message whose intake stated no segments."""
    if row.kind is MessageKind.SYSTEM:
        return []
    segments = [{"type": "text", "text": row.text}] if row.text else []
    if data.get("file_path"):
        name = data.get("file_name") or PurePosixPath(data["file_path"]).name
        kind = data.get("file_kind") or "file"
        stored = PurePosixPath(data["file_path"]).name
        segments.append({"type": kind, "text": f"[{kind.capitalize()}: {name}]", "file_name": stored})
    return segments
