"""What the running code belongs to: its call, the account that pays for it, and the caller of its route.

What the code sends or starts is recorded as part of the call's turn.

The call of a TOOL method runs again from its beginning if its worker dies. The rows of the first attempt
exist already, so a row with the same id is not written again. An effect is identified by its call, by the
lines of the plugin that cause it, and by how often they have caused it: a loop that sends a text three times
sends it three times, and a repetition sends what is missing. Its text does not count, since it may contain
a time, or what a model wrote.

An account is the id of a turn, of a run, call, timer or job outside of turns, or of a key of the API
(``storage.states.account_of_key``). What the code writes for later, such as a timer, is on the same account.
"""

from __future__ import annotations

import json
import sys
import threading
from collections import Counter
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import astuple, dataclass
from hashlib import sha256
from types import FrameType
from typing import Final, Generic, Self, TypeVar
from uuid import uuid4

from nekro_agent.schemas.call_context import CallContext

__all__ = [
    "CurrentCall",
    "Holding",
    "Payer",
    "WebCaller",
    "begin_account",
    "calling",
    "cause_turn_id",
    "current_account",
    "current_call",
    "current_caller",
    "current_payer",
    "effect_id",
    "effects_of",
    "on_account",
    "payer_of",
    "paying",
    "serving",
    "working_for",
]

T = TypeVar("T")

#: Packages whose frames are no part of a plugin: ours, and those that run its tasks and threads.
_RUNNERS: Final = frozenset(
    {
        "asyncio",
        "concurrent",
        "contextvars",
        "functools",
        "nekro",
        "nekro_agent",
        "storage",
        "threading",
        "workers",
    }
)
#: A package of ours whose frames are a plugin's: the plugin of MCP tools is in it.
_PLUGINS: Final = "nekro.extensions."


class Holding(Generic[T]):
    """Sets a context variable in a block; a class, as a generator per waiting call would take more memory."""

    __slots__ = ("_token", "_value", "_variable")

    def __init__(self, variable: ContextVar[T], value: T) -> None:
        self._variable, self._value = variable, value

    def __enter__(self) -> None:
        self._token = self._variable.set(self._value)

    def __exit__(self, *_: object) -> None:
        self._variable.reset(self._token)


#: Held while an effect is numbered; one shared lock takes less memory than one for each waiting call.
_numbering: Final = threading.Lock()


class _Effects:
    """The effects of one attempt of a call; plugins may cause them on several threads."""

    __slots__ = ("_call_id", "_counts")

    def __init__(self, call_id: str) -> None:
        self._call_id = call_id
        #: None: most calls have no effects.
        self._counts: Counter[bytes] | None = None

    def next_id(self, kind: str, identity: tuple[str, ...]) -> str:
        effect = json.dumps([self._call_id, kind, identity, _lines_of_plugin()]).encode()
        digest = sha256(effect).digest()
        with _numbering:
            if self._counts is None:
                self._counts = Counter()
            self._counts[digest] += 1
            number = self._counts[digest]
        return sha256(digest + b"%d" % number).hexdigest()[:32]


_effects: Final[ContextVar[_Effects | None]] = ContextVar("nekro_effects", default=None)


def effects_of(call_id: str) -> AbstractContextManager[None]:
    """Let the code of the block, and the tasks that it starts, be one attempt of a call."""
    return Holding(_effects, _Effects(call_id))


def effect_id(kind: str, *identity: str) -> str:
    """Return the id of a row that plugin code causes: 32 hexadecimal digits; random outside of calls.

    Call it before the first ``await``, so that concurrent effects count in the order of the plugin's code.

    Args:
        kind: what is written.
        identity: what distinguishes effects of the same line, such as the chat; not what may differ
            when the call is repeated.
    """
    effects = _effects.get()
    return uuid4().hex if effects is None else effects.next_id(kind, identity)


def _lines_of_plugin() -> list[tuple[str, str, int]]:
    """Return the plugin's part of the stack, the innermost frame first: module, function and line."""
    lines: list[tuple[str, str, int]] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        module = str(frame.f_globals.get("__name__"))
        if module.startswith(_PLUGINS) or module.partition(".")[0] not in _RUNNERS:
            lines.append((module, frame.f_code.co_qualname, frame.f_lineno))
        elif lines:
            break
        frame = frame.f_back
    return lines


@dataclass(frozen=True, kw_only=True, slots=True)
class Payer:
    """The plugin whose code runs, and for whom; None where there is no such thing."""

    plugin_key: str
    chat_key: str | None = None
    #: Platform id.
    user_id: str | None = None
    adapter_key: str | None = None
    turn_id: str | None = None
    #: The account besides the turn.
    account_id: str | None = None
    #: Most tokens that the plugin may use in a day (UTC); None: no limit of its own.
    tokens_per_day: int | None = None


_payer: Final[ContextVar[Payer | None]] = ContextVar("nekro_payer", default=None)

_account: Final[ContextVar[str | None]] = ContextVar("nekro_account", default=None)


class _Paying:
    __slots__ = ("_of_account", "_of_payer", "_value")

    def __init__(self, payer: Payer) -> None:
        self._value = payer

    def __enter__(self) -> None:
        payer = self._value
        inherited = current_account() if payer.chat_key else None
        self._of_payer = _payer.set(payer)
        self._of_account = _account.set(payer.turn_id or payer.account_id or inherited)

    def __exit__(self, *_: object) -> None:
        _account.reset(self._of_account)
        _payer.reset(self._of_payer)


def paying(payer: Payer) -> AbstractContextManager[None]:
    """Let the block, and the tasks that it starts, work on an account.

    Code that runs for a chat stays on the account of its cause if the payer names none. Other code, such as
    an init hook, leaves it, because its tasks outlive the cause.
    """
    return _Paying(payer)


def on_account(account_id: str | None) -> AbstractContextManager[None]:
    """Let the block, and the tasks that it starts, work on an account; None: on none."""
    return Holding(_account, account_id)


def begin_account(account_id: str | None) -> None:
    """Let the rest of this task work on an account: for a request, which is a task of its own."""
    _account.set(account_id)


def current_account() -> str | None:
    """Return the account of the running code; None if nothing that has one caused it."""
    return _account.get()


def current_payer() -> Payer | None:
    """Return the account of the running code; None outside of code of plugins."""
    return _payer.get()


def payer_of(plugin_key: str, *arguments: object) -> Payer:
    """Return the account of code that runs for the first context among its arguments."""
    ctx = next((argument for argument in arguments if isinstance(argument, CallContext)), None)
    if ctx is None:
        return Payer(plugin_key=plugin_key)
    return Payer(
        plugin_key=plugin_key,
        chat_key=ctx.from_chat_key,
        user_id=ctx.from_platform_userid,
        adapter_key=ctx.adapter_key,
    )


@dataclass(frozen=True, kw_only=True)
class WebCaller:
    """The holder of a gateway's key."""

    name: str
    #: The person in whose name the key acts; None: the key has none.
    user_id: str | None
    #: A ``nekro_agent.services.user.role.Role``.
    level: int
    #: On whose account the route works; None: on none.
    account_id: str | None = None

    def to_text(self) -> str:
        """Return it as a header's value."""
        return json.dumps(astuple(self))

    @classmethod
    def of_text(cls, text: str) -> Self:
        """Return what ``to_text`` has written."""
        # A gateway of an older release names no account.
        name, user_id, level, account_id = (*json.loads(text), None)[:4]
        return cls(name=name, user_id=user_id, level=level, account_id=account_id)


_web_caller: Final[ContextVar[WebCaller | None]] = ContextVar("nekro_web_caller", default=None)


def calling(caller: WebCaller | None) -> AbstractContextManager[None]:
    """Let the block serve a request of a caller; None: the caller is unknown."""
    return Holding(_web_caller, caller)


def current_caller() -> WebCaller | None:
    """Return whose request is served; None without a valid key."""
    return _web_caller.get()


@dataclass(frozen=True, kw_only=True, slots=True)
class CurrentCall:
    """The ids of a call."""

    call_id: str
    chat_key: str
    #: None outside rounds.
    round_id: str | None
    turn_id: str | None


#: The chat and the turn that started the job whose code runs.
_cause: Final[ContextVar[tuple[str, str] | None]] = ContextVar("nekro_cause_turn", default=None)

_call: Final[ContextVar[CurrentCall | None]] = ContextVar("nekro_current_call", default=None)


def serving(call: CurrentCall) -> AbstractContextManager[None]:
    """Let the code of the block, and the tasks that it starts, belong to a call."""
    return Holding(_call, call)


def working_for(chat_key: str, turn_id: str | None) -> AbstractContextManager[None]:
    """Let turns that the code of the block begins in a chat be caused by an earlier turn; None: by none."""
    return Holding(_cause, None if turn_id is None else (chat_key, turn_id))


def cause_turn_id(chat_key: str) -> str | None:
    """Return the turn on whose behalf the running code works; None if there is none, or of another chat."""
    call, cause = current_call(chat_key), _cause.get()
    if call is not None:
        return call.turn_id
    return cause[1] if cause is not None and cause[0] == chat_key else None


def current_call(chat_key: str) -> CurrentCall | None:
    """Return the call that the running code serves; None outside of calls, and for another chat."""
    call = _call.get()
    return call if call is not None and call.chat_key == chat_key else None
