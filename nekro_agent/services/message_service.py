"""Messages of people, of the agent and of the system, as a service object."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

from pydantic import BaseModel

from nekro_agent import runtime
from nekro_agent.api.message import checked_chat, push_system, sent_listeners
from nekro_agent.core.logger import get_sub_logger
from nekro_agent.errors import InvalidValueError
from nekro_agent.ports import IncomingMessage, MessageKind, OutgoingMessage
from nekro_agent.schemas.agent_message import AgentMessageSegment, AgentMessageSegmentType
from nekro_agent.schemas.chat_message import ChatMessage

__all__ = ["MessageService", "message_service"]

_FILES = ("image", "file")
_log = get_sub_logger("message_service")

#: Chats of the messages that wrappers of ``push_bot_message`` are shown, and that are recorded already.
_shown: Final[ContextVar[list[str]]] = ContextVar("nekro_shown_messages")


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
        normalize_at_markup: bool = True,
    ) -> None:
        """Record what the agent has said on the platform already; nothing is posted.

        ``_ctx.send_text`` posts a message and records it. A plugin may replace this method of
        ``message_service`` by a wrapper, which then sees each message that is sent and recorded in its
        process, after it was recorded. What the wrapper passes on for that message has no effect.

        Args:
            agent_messages: a text, or segments with ``type`` and ``content``.
            plt_response: an object whose ``message_id`` is the platform's id of the message; None if
                there is none.
            db_chat_channel: accepted for compatibility, not used.
            ref_msg_id: id of the message that this one answers.
            normalize_at_markup: accepted for compatibility, not used.

        Raises:
            InvalidValueError: ``chat_key`` is no chat key.
        """
        recorded = _shown.get([])
        if checked_chat(chat_key) in recorded:
            recorded.remove(chat_key)
            return
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

    async def _show_sent(self, message: OutgoingMessage, message_id: str, host_path: Path | None) -> None:
        """Show a message that was recorded to a plugin's wrapper of ``push_bot_message``, if there is one."""
        wrapper: Callable[..., Any] = self.push_bot_message
        if getattr(wrapper, "__func__", wrapper) is _PUSH_BOT_MESSAGE:
            return
        segment = AgentMessageSegment(
            type=AgentMessageSegmentType(message.file_kind or "text"), content=str(host_path or message.text)
        )
        answer = SimpleNamespace(success=True, message_id=message_id, error_message="")
        options = {"plt_response": answer, "ref_msg_id": message.reply_to}
        token = _shown.set([message.chat_key])
        try:
            result = wrapper(message.chat_key, [segment], **_accepted(wrapper, options))
            if inspect.isawaitable(result):
                await result
        except Exception as exc:  # plugin code; the message is sent, and its sender must not send it again
            _log.bind(chat=message.chat_key).opt(exception=exc).warning("message_wrapper_failed")
        finally:
            _shown.reset(token)

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

    async def _run_chat_agent_task(
        self, chat_key: str, message: ChatMessage | None = None, ctx: object = None
    ) -> None:
        """Like ``schedule_agent_task``, under the private name that published plugins wrap."""
        await self.schedule_agent_task(chat_key, message)


_PUSH_BOT_MESSAGE: Final = MessageService.push_bot_message

message_service = MessageService()
sent_listeners.append(message_service._show_sent)


def _accepted(function: Callable[..., Any], options: dict[str, Any]) -> dict[str, Any]:
    """Return the options that a function has parameters for; a wrapper may have those of an older release."""
    parameters = inspect.signature(function).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return options
    return {one.name: options[one.name] for one in parameters if one.name in options}


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
