"""Run code of a language model in isolation and pass its calls to plugins."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sandbox.models import (
    ARGUMENT_ERROR,
    Dispatch,
    KeptVariables,
    Limit,
    Raised,
    Returned,
    RunRequest,
    RunResult,
    Stopped,
    StopType,
    StubCall,
    StubMethod,
    StubResult,
)

if TYPE_CHECKING:
    from sandbox.drivers.selection import describe
    from sandbox.manager import SandboxManager

__all__ = [
    "ARGUMENT_ERROR",
    "Dispatch",
    "KeptVariables",
    "Limit",
    "Raised",
    "Returned",
    "RunRequest",
    "RunResult",
    "SandboxManager",
    "StopType",
    "Stopped",
    "StubCall",
    "StubMethod",
    "StubResult",
    "describe",
]


def __getattr__(name: str) -> Any:
    """Import the manager and the drivers on first use: processes that run no code save their memory."""
    if name == "SandboxManager":
        from sandbox.manager import SandboxManager

        return SandboxManager
    if name == "describe":
        from sandbox.drivers.selection import describe

        return describe
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
