"""The types of sandbox methods, their lanes and their registration."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

__all__ = ["OWN_NAMES", "Lane", "SandboxMethod", "SandboxMethodType"]

#: Names that the sandbox gives the code itself; a method of such a name has no bare name in the code.
OWN_NAMES: Final = frozenset({"_ck", "MethodError", "dynamic_importer"})


class SandboxMethodType(StrEnum):
    """How a method's result is used."""

    #: The value goes to the calling code.
    TOOL = "tool"
    #: The text becomes an observation and triggers the LLM at once; the calling code ends.
    AGENT = "agent"
    #: The value goes to the calling code, its text to the chat's history.
    BEHAVIOR = "behavior"
    #: Content parts become an observation and trigger the LLM at once; the calling code ends.
    MULTIMODAL_AGENT = "multimodal_agent"

    @property
    def wakes_agent(self) -> bool:
        """Whether a result ends the calling code and requests a follow-up round."""
        return self in (SandboxMethodType.AGENT, SandboxMethodType.MULTIMODAL_AGENT)


class Lane(StrEnum):
    """The kind of work that a task belongs to; each lane has its own queue and pool."""

    METHODS = "methods"
    LONG = "long"
    ROUNDS = "rounds"
    #: Each pinned plugin has a queue of its own, ``pinned.<plugin key>``, served by its owner.
    PINNED = "pinned"


@dataclass
class SandboxMethod:
    """One registered sandbox method, as ``mount_sandbox_method`` stores it."""

    method_type: SandboxMethodType
    name: str
    description: str
    func: Callable[..., Any]
    lane: Lane | None = None
    #: Whether a person must approve each call, unless the installation exempts the method.
    requires_approval: bool = False
    #: Whether a call of a TOOL method runs at most once, like those of the other types.
    once: bool = False
