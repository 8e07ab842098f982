"""Runs code of an LLM in isolation, and carries its calls to plugins."""

from sandbox.drivers.selection import describe
from sandbox.manager import SandboxManager
from sandbox.models import (
    ARGUMENT_ERROR,
    Dispatch,
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

__all__ = [
    "ARGUMENT_ERROR",
    "Dispatch",
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
