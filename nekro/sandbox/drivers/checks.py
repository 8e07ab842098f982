"""Checks for ``nekro doctor`` that several drivers share."""

from __future__ import annotations

from collections.abc import Callable

from nekro.sandbox.driver import Check
from nekro.sandbox.interpreter import Interpreter
from nekro_agent.errors import SandboxUnavailableError

__all__ = ["check_of", "describe_interpreter"]


def check_of(name: str, look: Callable[[], str]) -> Check:
    """Return the check for an attempt: ok with its result, or failed with the error that it raised."""
    try:
        return Check(name=name, ok=True, detail=look())
    except SandboxUnavailableError as exc:
        return Check(name=name, ok=False, detail=str(exc))


def describe_interpreter(interpreter: Interpreter) -> str:
    """Return path, version and note of the Python inside."""
    version = ".".join(map(str, interpreter.version))
    note = f" ({interpreter.note})" if interpreter.note else ""
    return f"{interpreter.executable}, Python {version}{note}"
