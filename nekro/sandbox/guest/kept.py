"""Keep the code's top-level variables for the turn's next program, as tagged text."""

from __future__ import annotations

import builtins
import os
import sys
from _json import encode_basestring
from typing import TYPE_CHECKING

from nekro.sandbox.guest.channel import KEEP, unsignalled
from nekro.sandbox.guest.tables import form_of, value_of
from nekro.sandbox.guest.values import open_value
from nekro.wire.tagged import write_arguments

if TYPE_CHECKING:
    from typing import Any

    from nekro.sandbox.guest.channel import Channel

__all__ = ["Variables"]

MOST_NAME_CHARS = 64
#: What tagged arguments have around the text of one named value.
BEFORE, AFTER = '[[],{"v":', "}]"
#: How long the threads of the code may delay the frame.
LOCK_SECONDS = 1.0

Function = type(lambda: None)
Module = type(sys)


class Variables:
    """Gives the code the variables of the program before it, and sends those that it leaves."""

    def __init__(self, run: dict[str, Any], names: dict[str, Any], channel: Channel) -> None:
        """
        Args:
            names: the globals that the code sees; ``restore`` adds the variables.
        """
        self._begins_with = run["variables"]
        self._most_bytes = run["keep"]["bytes"]
        self._most = run["keep"]["most"]
        self._names = names
        self._channel = channel
        #: Globals before the code ran. A name that was predefined is not kept, even if the code reassigns it.
        self._given = dict(names)
        self._is_sent = False

    def restore(self) -> None:
        """Give the code its variables; one whose package is missing by now is left out with a line."""
        for name, text in self._begins_with.items():
            if name in self._names or hasattr(builtins, name):
                continue
            try:
                self._names[name] = value_of(open_value(text.encode()))
            except Exception as exc:
                print(f"[{name} was not kept: {type(exc).__name__}: {exc}]", file=sys.stderr)

    def send(self) -> None:
        """Send what can be kept, once; whatever fails, the end of the code is not delayed further."""
        if not self._most_bytes or self._is_sent or os.getpid() != self._channel.owner:
            return
        self._is_sent = True
        try:
            unsignalled(self._channel.send_last, KEEP, self._payload(), LOCK_SECONDS)
        except BaseException as exc:
            print(f"[variables were not kept: {type(exc).__name__}: {exc}]", file=sys.stderr)

    def _payload(self) -> bytes:
        left = self._most_bytes
        kept: list[str] = []
        others: list[str] = []
        for name, value in list(self._names.items()):
            if not is_shown(name) or value is self._given.get(name, others) or is_imported(value):
                continue
            text = None
            if name not in self._given and not hasattr(builtins, name) and len(kept) < self._most:
                text = text_of(value, left)
            if text is None:
                others.append(encode_basestring(name))
                continue
            left -= len(text.encode())
            kept.append(f"{encode_basestring(name)}:{encode_basestring(text)}")
        return f"[[{','.join(others[: self._most])}],{{{','.join(kept)}}}]".encode()


def is_shown(name: Any) -> bool:
    """Whether a variable is meant for later: names with an underscore are for the moment."""
    return type(name) is str and len(name) <= MOST_NAME_CHARS and name.isidentifier() and name[0] != "_"


def is_imported(value: Any) -> bool:
    """Whether a value is a module, or a function or class of one."""
    kind = type(value)
    if kind is Module:
        return True
    if kind is Function or issubclass(kind, type):
        return bool(value.__module__ != "__main__")
    return kind is type(len)


def text_of(value: Any, most_bytes: int) -> str | None:
    """Return the tagged text of a value; None if it has none or a longer one."""
    try:
        form = form_of(value, most_bytes)
        plain = value if form is None else form
        text = write_arguments((), {"v": plain}, most_bytes + len(BEFORE) + len(AFTER))
        text = text[len(BEFORE) : -len(AFTER)]
        return text if len(text.encode()) <= most_bytes else None
    except Exception:  # not plain, too long, changed by a thread meanwhile, a lone surrogate
        return None
