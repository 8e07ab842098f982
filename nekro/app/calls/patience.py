"""How long code waits for a call, and what it gets when the call continues without it."""

from __future__ import annotations

from broker_config.settings import WorkerSettings
from nekro.plugins.entries import MethodEntry
from nekro.sandbox.models import STOPS, Raised, Returned, Stopped, StubResult
from nekro.wire.values import encode_value
from nekro_agent.methods import Lane, SandboxMethodType

__all__ = ["lane_seconds", "still_running", "wait_seconds"]


def lane_seconds(settings: WorkerSettings, lane: str) -> float:
    """Time limit of the calls of a lane, by its name."""
    return settings.long_timeout_seconds if lane == Lane.LONG.value else settings.call_timeout_seconds


def wait_seconds(entry: MethodEntry, *, lane: str, settings: WorkerSettings) -> float:
    """How long code waits for a call before the call is detached; 0 for effects of lane ``long``."""
    if lane == Lane.LONG.value and entry.type is not SandboxMethodType.TOOL:
        return 0.0
    return settings.wait_seconds


def still_running(entry: MethodEntry, call_id: str) -> StubResult:
    """Return the result that code gets when its call is detached."""
    stop = STOPS.get(entry.type)
    if stop is not None:
        return Stopped(stop=stop)
    if entry.type is SandboxMethodType.BEHAVIOR:
        text = (
            f"{entry.name} is still running, as job {call_id}. Its result will appear in this chat when it "
            "is done; do not call it again."
        )
        return Returned(value=encode_value(text, max_bytes=1 << 16))
    return Raised(
        error_type="StillRunning",
        message=f"{entry.name} has no value yet: it continues as job {call_id}. Its value will appear in "
        "this chat when it is done, and you will be asked again; do not call it again.",
    )
