"""Messages of people, of the agent and of the system, as a service object."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel

from nekro_agent import runtime
from nekro_agent.api.message import push_system
from nekro_agent.errors import InvalidValueError
from nekro_agent.ports import IncomingMessage, MessageKind
from nekro_agent.schemas.chat_message import ChatMessage

__all__ = ["MessageService", "message_service"]

_FILES = ("image", "file")


class MessageService:
    """``message_service`` of the reference."""

    async def push_human_message(
        self,
        message: ChatMessage,
        user: object = None,
        trigger_agent: bool = False,
        db_chat_channel: object = None,
    ) -> None:
        """Receive a person's message as if their platform had sent it: hooks, history, and a turn.

        Args:
            user: accepted for compatibility; ``message`` names the sender.
            trigger_agent: start a turn although the message is not addressed to the agent (``is_tome`` is 0).
            db_chat_channel: accepted for compatibility, not used.

        Raises:
            InvalidValueError: ``message`` is no ``ChatMessage``.
        """
        if not isinstance(message, ChatMessage):
            raise InvalidValueError(f"push_human_message needs a ChatMessage, not {type(message).__name__}")
        await (
            runtime.current()
            .service("intake")
            .receive(
                IncomingMessage(
                    chat_key=message.chat_key,
                    text=message.content_text,
                    user_id=message.platform_userid or message.sender_id,
                    user_name=message.sender_name or message.sender_nickname,
                    nickname=message.sender_nickname,
                    is_tome=bool(message.is_tome) or trigger_agent,
                    adapter_key=message.adapter_key or None,
                    platform_message_id=message.message_id,
                    content_data=[_plain(segment) for segment in message.content_data],
                    ext_data=message.ext_data,
                    raw_cq_code=message.raw_cq_code,
                )
            )
        )

    async def push_bot_message(
        self,
        chat_key: str,
        agent_messages: str | Sequence[Any],
        plt_response: object = None,
        db_chat_channel: object = None,
        ref_msg_id: str | None = None,
    ) -> None:
        """Record what the agent has said on the platform already; nothing is posted.

        ``_ctx.send_text`` posts a message and records it.

        Args:
            agent_messages: a text, or segments with ``type`` and ``content``.
            plt_response: an object whose ``message_id`` is the platform's id of the message; None if
                there is none.
            db_chat_channel: accepted for compatibility, not used.
            ref_msg_id: id of the message that this one answers.
        """
        data: dict[str, Any] = {"is_posted": True, "content_data": _content(agent_messages)}
        if ref_msg_id:
            data["ext_data"] = {"ref_msg_id": ref_msg_id}
        message_id = getattr(plt_response, "message_id", None)
        if message_id:
            data["message_id"] = str(message_id)
        records = runtime.current().service("records")
        await records.add_message(
            chat_key, kind=MessageKind.ASSISTANT, text=_text_of(agent_messages), data=data
        )

    async def push_system_message(
        self,
        chat_key: str,
        agent_messages: str | Any,
        trigger_agent: bool = False,
        db_chat_channel: object = None,
    ) -> None:
        """Add a system message to a chat's history; optionally trigger the agent.

        Args:
            agent_messages: a text, or a list of segments with ``content`` or ``text``.
            db_chat_channel: accepted for compatibility, not used.
        """
        await push_system(chat_key, _text_of(agent_messages), trigger_agent=trigger_agent)

    async def schedule_agent_task(
        self, chat_key: str | None = None, message: ChatMessage | None = None, **unused: object
    ) -> None:
        """Request a round of the agent of a chat, or of a message's chat.

        Raises:
            InvalidValueError: neither is given.
        """
        wanted = chat_key or (message.chat_key if message is not None else None)
        if not wanted:
            raise InvalidValueError("schedule_agent_task: pass chat_key or message")
        await runtime.current().messages.wake(wanted)


message_service = MessageService()


def _plain(segment: object) -> dict[str, Any]:
    if isinstance(segment, BaseModel):
        return segment.model_dump(mode="json")
    if isinstance(segment, Mapping):
        return dict(segment)
    raise InvalidValueError(f"a message segment must be a ChatMessageSegment, not {type(segment).__name__}")


def _content(messages: object) -> list[dict[str, Any]]:
    if not isinstance(messages, list | tuple):
        return [{"type": "text", "text": _text_of(messages)}]
    return [_segment(part) for part in messages]


def _segment(part: object) -> dict[str, Any]:
    kind = str(getattr(part, "type", "text"))
    content = _raw_text(part)
    if kind not in _FILES:
        return {"type": "text", "text": content}
    return {
        "type": kind,
        "text": f"[{kind.capitalize()}: {content}]",
        "file_name": content.rsplit("/", 1)[-1],
    }


def _text_of(messages: object) -> str:
    if isinstance(messages, list | tuple):
        return "".join(_text_of(part) for part in messages)
    kind = str(getattr(messages, "type", "text"))
    text = _raw_text(messages)
    return f"[{kind.capitalize()}: {text}]" if kind in _FILES else text


def _raw_text(part: object) -> str:
    for name in ("content", "text"):
        text = getattr(part, name, None)
        if isinstance(text, str):
            return text
    return str(part)
