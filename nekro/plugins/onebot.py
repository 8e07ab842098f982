"""Handlers that plugins register with nonebot's ``on_command``, run as commands of the plugin.

A handler runs where it means the same here: it may use the matcher (``send``, ``finish``), the text after the
command, and from the event the user, the chat, the text, an id and the time; its permission is none or
``SUPERUSER``. The bot
is a placeholder, so only handlers that use it fail. Other registrations (rules, ``got``, further permissions)
have no effect, and ``nekro plugins`` lists them.
"""

from __future__ import annotations

import inspect
import re
import uuid
from collections.abc import Callable, Collection, Iterator
from contextvars import ContextVar
from types import FunctionType, SimpleNamespace
from typing import Annotated, Any, Final, NoReturn

from nekro_agent import placeholders
from nekro_agent.commands.registration import CmdCtl, Command, keep
from nekro_agent.commands.schemas import ArgSpec, CommandExecutionContext, CommandPermission, CommandResponse
from nekro_agent.execution.greenlets import run_callable
from nekro_agent.models.base import stable_id
from nekro_agent.placeholders import Placeholder
from nekro_agent.schemas.chat_message import ChatType
from nekro_agent.shared_clock import shared_now

__all__ = ["install"]

_Finished: Final = placeholders.exception_class("nonebot.exception.FinishedException")
_BOT: Final = Placeholder("nonebot.adapters.onebot.v11.Bot")
_SUPERUSER: Final = Placeholder("nonebot.permission.SUPERUSER")
#: A mention in a text, as intakes write it.
_MENTION: Final = re.compile(r"\[@(?:id:)?(?P<id>\w+)(?:;nickname:[^@\]\n]*)?@\]")
#: Default of the parameter that receives the text after the command.
_ARGUMENT: Final = object()
_ARGUMENTS_OF_NO_EFFECT: Final = frozenset({"priority", "block", "force_whitespace", "temp", "state"})

#: What a parameter receives, by the name of its type.
_KINDS: Final = {
    "Bot": "bot",
    "Event": "event",
    "GroupMessageEvent": "group",
    "Matcher": "matcher",
    "MessageEvent": "event",
    "PrivateMessageEvent": "private",
}
_WORDS_OF_UNIONS: Final = {"None", "Optional", "Union", "placeholder"}

#: Texts of the running handler.
_sent: ContextVar[list[str]] = ContextVar("nekro_onebot_sent")


class Message(str):
    """The text after a command: a ``Message`` for most uses, whose segments are texts and mentions."""

    def extract_plain_text(self) -> str:
        return self.strip()

    def __iter__(self) -> Iterator[Any]:
        end = 0
        for mention in _MENTION.finditer(self):
            if text := self[end : mention.start()]:
                yield SimpleNamespace(type="text", data={"text": text})
            yield SimpleNamespace(type="at", data={"qq": mention["id"]})
            end = mention.end()
        if end < len(self):
            yield SimpleNamespace(type="text", data={"text": self[end:]})


class MessageEvent:
    """The message that a handler answers; attributes that do not exist here raise."""

    def __init__(self, who: CommandExecutionContext, text: str) -> None:
        self.who = who
        self.user_id: int | str = int(who.user_id) if who.user_id.isdecimal() else who.user_id
        chat_type = ChatType.from_chat_key(who.chat_key)
        self.message_type = "group" if chat_type is ChatType.GROUP else "private"
        self.sender = SimpleNamespace(user_id=self.user_id, nickname=who.username, card="")
        self.raw_message = text
        #: A number, as on the platform; the same when a line is run again under its id.
        self.message_id = stable_id(who.message_id or uuid.uuid4().hex)
        self.chat_key = who.chat_key
        self.post_type = "message"
        self.time = int(shared_now())
        self.reply = None
        self.to_me = True
        if chat_type is ChatType.GROUP:
            number = who.chat_key.rpartition("_")[2]
            self.group_id: int | str = int(number) if number.isdecimal() else number

    def get_user_id(self) -> str:
        return self.who.user_id

    def get_session_id(self) -> str:
        is_group = self.message_type == "group"
        return f"group_{self.group_id}_{self.user_id}" if is_group else str(self.user_id)

    def get_type(self) -> str:
        return self.post_type

    def is_tome(self) -> bool:
        return self.to_me

    def get_plaintext(self) -> str:
        return self.raw_message

    def get_message(self) -> Message:
        return Message(self.raw_message)

    message = original_message = property(get_message)

    def __getattr__(self, name: str) -> Any:
        return getattr(Placeholder("nonebot.adapters.onebot.v11.MessageEvent"), name)


class GroupMessageEvent(MessageEvent):
    """A message in a group."""


class PrivateMessageEvent(MessageEvent):
    """A message to the agent alone."""


class Matcher:
    """What ``on_command`` returns, and what its handlers receive as matcher."""

    def __init__(self, name: str, aliases: Collection[str], *, is_super: bool, is_plain: bool) -> None:
        self._name, self._aliases = name, tuple(aliases)
        self._is_super, self._is_plain = is_super, is_plain

    def handle(self, *args: Any, **kwargs: Any) -> Callable[[FunctionType], FunctionType]:
        """Register a handler as a command of its plugin."""

        def register(handler: FunctionType) -> FunctionType:
            kinds = _kinds(handler) if self._is_plain and not args and not kwargs else None
            if kinds is None:
                placeholders.record_decorated(f"nonebot.on_command({self._name!r}).handle(…)", handler)
            else:
                keep(handler.__module__, self._command(handler, kinds))
            return handler

        return register

    def _command(self, handler: FunctionType, kinds: dict[str, str]) -> Command:
        return Command(
            name=self._name,
            description=(handler.__doc__ or "").strip().partition("\n")[0],
            aliases=self._aliases,
            permission=CommandPermission.SUPER_USER if self._is_super else CommandPermission.PUBLIC,
            usage="",
            category="plugin",
            tags=(),
            internal=False,
            func=_command_of(self, handler, kinds),
        )

    async def send(self, message: object, **_: object) -> None:
        """Add a text to the command's answer."""
        _sent.get().append(str(message))

    async def finish(self, message: object = None, **_: object) -> NoReturn:
        """Add a text to the command's answer, if there is one, and end the handler."""
        if message is not None:
            await self.send(message)
        raise _Finished

    def __getattr__(self, name: str) -> Any:
        return getattr(Placeholder(f"nonebot.on_command({self._name!r})"), name)


def install() -> None:
    """Give plugins these names instead of placeholders."""
    for module in ("nonebot", "nonebot.plugin", *_COMMAND_MODULES):
        placeholders.provide(f"{module}.on_command", _on_command)
    for module in _COMMAND_MODULES:
        placeholders.provide(f"{module}.command_guard", _command_guard)
        placeholders.provide(f"{module}.reset_command_guard", _command_guard)
        placeholders.provide(f"{module}.finish_with", _finish_with)
    placeholders.provide("nonebot.params.CommandArg", lambda: _ARGUMENT)
    placeholders.provide("nonebot.permission.SUPERUSER", _SUPERUSER)
    placeholders.provide("nonebot.matcher.Matcher", Matcher)
    placeholders.provide("nonebot.adapters.Event", MessageEvent)
    placeholders.provide("nonebot.adapters.Message", Message)
    for kind in (Message, MessageEvent, GroupMessageEvent, PrivateMessageEvent):
        placeholders.provide(f"nonebot.adapters.onebot.v11.{kind.__name__}", kind)


_COMMAND_MODULES: Final = tuple(
    f"nekro_agent.{package}.{module}"
    for package in ("matchers", "adapters.onebot_v11.matchers")
    for module in ("command", "guard")
)


def _on_command(
    cmd: str | tuple[str, ...],
    rule: object = None,
    aliases: Collection[str] = (),
    *,
    permission: object = None,
    **options: Any,
) -> Matcher:
    name = cmd if isinstance(cmd, str) else ".".join(cmd)
    is_super = permission is _SUPERUSER
    is_plain = rule is None and (permission is None or is_super) and options.keys() <= _ARGUMENTS_OF_NO_EFFECT
    texts = [alias for alias in aliases or () if isinstance(alias, str)]
    return Matcher(name, texts, is_super=is_super, is_plain=is_plain)


async def _command_guard(
    event: MessageEvent, bot: object, arg: Message, matcher: Matcher, **_: object
) -> tuple[str, str, str, ChatType]:
    """Return user name, text, chat key and kind of chat; other users than super users are refused."""
    who = event.who
    if not who.is_super_user:
        await matcher.finish("this command needs the permission super_user")
    return (
        who.username or who.user_id,
        arg.extract_plain_text(),
        who.chat_key,
        ChatType.from_chat_key(who.chat_key),
    )


async def _finish_with(matcher: Matcher, message: str) -> NoReturn:
    await matcher.finish(message)


def _kinds(handler: FunctionType) -> dict[str, str] | None:
    """Return what each parameter receives; None if there is one that nothing here can be passed to."""
    kinds: dict[str, str] = {}
    for name, parameter in inspect.signature(handler).parameters.items():
        kind = _kind(parameter)
        if kind is None:
            return None
        kinds[name] = kind
    return kinds


def _kind(parameter: inspect.Parameter) -> str | None:
    if parameter.default is _ARGUMENT:
        return "arg"
    annotation = parameter.annotation
    if annotation is parameter.empty:
        word = {"args": "arg", "ev": "event"}.get(parameter.name, parameter.name)
        return word if word in ("matcher", "event", "bot", "arg") else None
    text = annotation.__name__ if isinstance(annotation, type) else str(annotation)
    words = {word.rpartition(".")[2] for word in re.findall(r"[\w.]+", text)} - _WORDS_OF_UNIONS
    kinds = {_KINDS.get(word) for word in words}
    if len(kinds) > 1 and kinds <= {"event", "group", "private"}:
        return "event"
    return kinds.pop() if len(kinds) == 1 else None


def _command_of(matcher: Matcher, handler: FunctionType, kinds: dict[str, str]) -> Callable[..., Any]:
    async def run(
        context: CommandExecutionContext, text: Annotated[str, ArgSpec(positional=True, greedy=True)] = ""
    ) -> CommandResponse:
        is_group = ChatType.from_chat_key(context.chat_key) is ChatType.GROUP
        event = (GroupMessageEvent if is_group else PrivateMessageEvent)(context, text)
        argument = Message(text)
        wanted = {kind for kind in kinds.values() if kind in ("group", "private")}
        if wanted and event.message_type not in wanted:
            return CmdCtl.failed(f"this command is for {wanted.pop()} chats")
        values = {
            "matcher": matcher,
            "event": event,
            "group": event,
            "private": event,
            "bot": _BOT,
            "arg": argument,
        }
        sent: list[str] = []
        token = _sent.set(sent)
        try:
            await run_callable(handler, **{name: values[kind] for name, kind in kinds.items()})
        except _Finished:
            pass
        finally:
            _sent.reset(token)
        return CmdCtl.success("\n".join(sent))

    return run
