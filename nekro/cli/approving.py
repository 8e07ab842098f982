"""Decisions of the person at the terminal."""

from __future__ import annotations

import os
import pwd
import sys

from nekro.cli.command import Deps
from nekro_agent.errors import UsageError

__all__ = ["confirm", "operator"]


def operator() -> str:
    """Return the identity of the shell's user, as decisions record it."""
    try:
        name = pwd.getpwuid(os.getuid()).pw_name
    except KeyError:  # a container may run under an id without a name
        name = str(os.getuid())
    return f"shell:{name}"


def confirm(question: str, *, assumed: bool, deps: Deps) -> None:
    """Return if the person at the terminal agrees.

    Args:
        assumed: agreed by an option; nothing is asked.

    Raises:
        UsageError: the person does not agree, or there is no terminal to ask on.
    """
    if assumed:
        return
    if not sys.stdin.isatty():
        raise UsageError("there is no terminal to ask on; read the call above, then add --yes")
    deps.output.words(f"{question} [y/N]")
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise UsageError("not approved; nothing was changed")
