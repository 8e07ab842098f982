"""The steps of a task: one call of a method each, whose arguments may be results of earlier steps."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

__all__ = ["STEPS", "Step", "arguments", "program", "step_of"]

#: `$2`: the result of step 2; `$text2`: its text; `$chat`: the key of the chat.
_REFERENCE: Final = re.compile(r"\$(?:(text)?([1-9][0-9]*)|chat)")


@dataclass(frozen=True, kw_only=True)
class Step:
    """One call; a text argument that is a reference stands for its value."""

    #: ``author.module.function``.
    method: str
    arguments: Mapping[str, Any]


#: The default task, on two shipped plugins and the method that sends: each step needs the one before it.
STEPS: Final = (
    Step(method="nekro.preferences.set_preference", arguments={"name": "city", "value": "Oslo"}),
    Step(method="nekro.preferences.get_preference", arguments={"name": "city"}),
    Step(
        method="nekro.notes.save_note",
        arguments={"note_id": "trip", "title": "$2", "content": "Pack an umbrella and the map of the town."},
    ),
    Step(method="nekro.notes.read_note", arguments={"note_id": "trip"}),
    Step(method="nekro.basic.send_msg_text", arguments={"chat_key": "$chat", "message_text": "$text4"}),
)


def step_of(text: str) -> Step:
    """Read ``METHOD {"argument": value}``, as ``--step`` takes it.

    Raises:
        ArgumentTypeError: it has no such form.
    """
    method, _, rest = text.partition(" ")
    try:
        arguments = json.loads(rest or "{}")
    except ValueError as exc:
        raise argparse.ArgumentTypeError(f"the arguments of {method} are no JSON: {exc}") from None
    if method.count(".") != 2 or not isinstance(arguments, dict):
        raise argparse.ArgumentTypeError(f'{text!r} is not author.module.function {{"argument": value}}')
    return Step(method=method, arguments=arguments)


def arguments(step: Step, results: Sequence[Any], *, chat_key: str) -> dict[str, Any]:
    """Return the arguments of a step after the results of the earlier ones."""

    def value(given: Any) -> Any:
        found = _REFERENCE.fullmatch(given) if isinstance(given, str) else None
        if found is None:
            return given
        if found[2] is None:
            return chat_key
        result = results[int(found[2]) - 1]
        return str(result) if found[1] else result

    return {name: value(given) for name, given in step.arguments.items()}


def program(steps: Sequence[Step]) -> str:
    """Return a program that takes all steps."""

    def value(given: Any) -> str:
        found = _REFERENCE.fullmatch(given) if isinstance(given, str) else None
        if found is None:
            return repr(given)
        if found[2] is None:
            return "_ck"
        return f"str(r{found[2]})" if found[1] else f"r{found[2]}"

    lines = []
    for number, step in enumerate(steps, start=1):
        given = ", ".join(f"{name}={value(one)}" for name, one in step.arguments.items())
        lines.append(f"r{number} = {step.method}({given})")
    return "\n".join(lines)
