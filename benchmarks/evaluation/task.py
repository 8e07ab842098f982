"""How a task is defined: what a person wants, what a model answers, and how the outcome is checked.

A task is played twice: by programs, as rounds of the system, and by classic tool calling, as a loop of
requests with the methods as tools. Both have a script of the model's answers, which a real model replaces,
and both must reach the same outcome.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from textwrap import dedent
from typing import Any, Final

__all__ = [
    "Check",
    "Decision",
    "Delivered",
    "Effect",
    "Reply",
    "Said",
    "Seen",
    "Task",
    "approve",
    "call",
    "deny",
    "empty",
    "program",
    "raw",
    "says",
    "words",
]

_PLACEHOLDER: Final = re.compile(r"\$\{(\w+)\}")


@dataclass(frozen=True, kw_only=True)
class Said:
    """One message of the person, with files by name.

    ``jobs_go_on``: the next message comes although jobs still run, such as one that waits for it.
    """

    text: str
    files: Mapping[str, bytes]
    jobs_go_on: bool = False


@dataclass(frozen=True, kw_only=True)
class Reply:
    """One scripted answer of the model.

    ``after`` is what the prompt's last message must contain, as a regular expression whose named groups fill
    ``${name}`` in this answer and in later ones: so an answer depends on what the system really showed. None:
    the newest text of the person, or a tool's result that is no error. ``images`` is how many pictures the
    whole prompt must have at least.
    ``tool`` is the name of a method that is called with ``text`` as its JSON arguments; None: a text.
    """

    text: str
    after: str | None = None
    images: int = 0
    tool: str | None = None

    def filled(self, groups: Mapping[str, str]) -> str:
        """Return the text with the groups that were found so far."""
        return _PLACEHOLDER.sub(lambda found: groups.get(found[1], found[0]), self.text)


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What the person decides on a call that requires approval; ``kwargs`` replace its arguments."""

    is_approved: bool
    scope: str = "once"
    reason: str | None = None
    kwargs: Mapping[str, Any] | None = None


@dataclass(frozen=True, kw_only=True)
class Delivered:
    """A file that the chat got."""

    name: str
    media_type: str
    content: bytes


@dataclass(frozen=True, kw_only=True)
class Effect:
    """A line that a plugin's method wrote into its log of effects."""

    kind: str
    fields: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What can be seen of a task from outside, in order."""

    texts: Sequence[str] = ()
    files: Sequence[Delivered] = ()
    effects: Sequence[Effect] = ()
    #: Full names of the methods that were called and did not fail.
    calls: Sequence[str] = ()


#: Returns what is wrong with an outcome; None: nothing.
Check = Callable[[Seen], str | None]


@dataclass(frozen=True, kw_only=True)
class Task:
    """One task; ``decisions`` are made in this order, for each call that waits for approval."""

    name: str
    person: Sequence[Said]
    model: Sequence[Reply]
    tools: Sequence[Reply]
    outcome: Sequence[Check]
    decisions: Sequence[Decision] = ()


def says(text: str, *, jobs_go_on: bool = False, **files: str | bytes) -> Said:
    """Return a message; ``prices_csv="…"`` uploads ``prices.csv``."""
    return Said(
        text=text,
        jobs_go_on=jobs_go_on,
        files={
            ".".join(name.rsplit("_", 1)): dedent(content).encode() if isinstance(content, str) else content
            for name, content in files.items()
        },
    )


def program(code: str, *, after: str | None = None, images: int = 0, thought: str = "") -> Reply:
    """Return an answer that is a program."""
    text = f"{thought}\n\n```python\n{dedent(code).strip()}\n```"
    return Reply(text=text.lstrip(), after=after, images=images)


def words(text: str, *, after: str | None = None, images: int = 0) -> Reply:
    """Return an answer in words."""
    return Reply(text=dedent(text).strip(), after=after, images=images)


def raw(text: str, *, after: str | None = None) -> Reply:
    """Return an answer as it is, for answers of other forms."""
    return Reply(text=text, after=after)


def empty(*, after: str | None = None) -> Reply:
    """Return an empty program: there is nothing to do."""
    return Reply(text="```python\n```", after=after)


def call(tool: str, arguments: Mapping[str, Any] | str = "{}", *, after: str | None = None) -> Reply:
    """Return a tool call; arguments as JSON text may have ``${name}``."""
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return Reply(text=text, after=after, tool=tool)


def approve(*, scope: str = "once", kwargs: Mapping[str, Any] | None = None) -> Decision:
    """Let the call run."""
    return Decision(is_approved=True, scope=scope, kwargs=kwargs)


def deny(reason: str) -> Decision:
    """Refuse the call."""
    return Decision(is_approved=False, reason=reason)
