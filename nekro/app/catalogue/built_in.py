"""The methods that every chat's code has without a plugin, as entries of the catalogue."""

from __future__ import annotations

from typing import Final

from nekro.plugins.entries import MethodEntry
from nekro_agent.methods import BUILT_IN_METHODS, BUILT_IN_PLUGIN, Lane, SandboxMethodType

__all__ = ["BUILT_IN_TASKS", "built_in_entries", "built_in_entry"]

#: The methods by Celery task.
BUILT_IN_TASKS: Final = {f"{BUILT_IN_PLUGIN}.{name}": method for name, method in BUILT_IN_METHODS.items()}


def built_in_entry(task: str, *, in_round: bool) -> MethodEntry | None:
    """Return a built-in method for the code of a round, or for other code; None if no task has that name.

    Outside of rounds nothing is gained by a follow-up round: the code gets the text of AGENT methods.
    """
    method = BUILT_IN_TASKS.get(task)
    if method is None:
        return None
    is_value = method.type.wakes_agent and not in_round
    return MethodEntry(
        name=method.name,
        task=task,
        plugin_key=BUILT_IN_PLUGIN,
        label=method.name,
        type=SandboxMethodType.TOOL if is_value else method.type,
        signature=method.signature,
        doc=method.doc,
        lane=Lane.METHODS,
    )


def built_in_entries(*, in_round: bool) -> list[MethodEntry]:
    """Return the built-in methods for the code of a round, or for other code."""
    entries = (built_in_entry(task, in_round=in_round) for task in BUILT_IN_TASKS)
    return [entry for entry in entries if entry is not None]
