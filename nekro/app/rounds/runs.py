"""Runs code that calls methods in a sandbox, outside of a round."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Self

from nekro.app.budgets.run_meter import RunMeter
from nekro.app.calls.dispatch import CallScope, Dispatcher
from nekro.app.calls.story import call_json
from nekro.app.chats.contexts import context_of
from nekro.broker.tracing import span
from nekro.plugins.entry_registry import Registry
from nekro.sandbox.models import RunRequest, StopType
from nekro.wire.invocation import new_id
from nekro_agent.errors import ResultError
from nekro_agent.ports import ChatInfo

if TYPE_CHECKING:
    from nekro.sandbox.manager import SandboxManager

__all__ = ["CodeReport", "CodeRuns"]


@dataclass(frozen=True, kw_only=True)
class CodeReport:
    """The result of a run of code; ``calls`` and ``follow_ups`` are JSON data."""

    stop_type: StopType
    output: str
    #: Last line of the traceback, or the limit that ended the run; None if it succeeded.
    error: str | None
    calls: list[dict[str, Any]]
    #: Whether a call was detached and continues as a job.
    has_detached: bool
    #: Rounds that AGENT results requested: ``{"round_id", "method"}``.
    follow_ups: list[dict[str, Any]]

    def to_plain(self) -> dict[str, Any]:
        """Return the report as JSON data."""
        plain = {field.name: getattr(self, field.name) for field in fields(self)}
        return plain | {"stop_type": int(self.stop_type)}

    @classmethod
    def from_plain(cls, plain: object) -> Self:
        """Read what ``to_plain`` returned; fields of newer releases are ignored.

        Raises:
            ResultError: it is not a report.
        """
        try:
            known = {field.name: plain[field.name] for field in fields(cls)}  # type: ignore[index]
            return cls(**known | {"stop_type": StopType(known["stop_type"])})
        except (LookupError, TypeError, ValueError) as exc:
            raise ResultError(f"a worker returned no report of a run: {exc!r}") from exc


class CodeRuns:
    """Runs code in the same way as code of the model."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        registry: Registry,
        sandboxes: Callable[[], Awaitable[SandboxManager]],
        meter: RunMeter,
    ) -> None:
        self._dispatcher = dispatcher
        self._registry = registry
        self._sandboxes = sandboxes
        self._meter = meter

    async def run(
        self,
        code: str,
        *,
        chat: ChatInfo,
        user_id: str | None,
        wakes_agent: bool,
        run_id: str | None = None,
        wall_seconds: float | None = None,
        on_output: Callable[[str], None] | None = None,
    ) -> CodeReport:
        """Run code on behalf of a chat and a user (None: no user).

        Args:
            wakes_agent: whether an AGENT result requests a round.
            run_id: under which a key of the API pays for it; None makes a new one.
            wall_seconds, on_output: as in ``RunRequest``.

        Raises:
            BudgetExceededError: a budget is used up; the code did not run.
            SandboxUnavailableError, SandboxError: the code did not run.
        """
        manager = await self._sandboxes()
        entries = await self._registry.available(context_of(chat, user_id=user_id))
        run_id = run_id or new_id()
        scope = CallScope(chat=chat, user_id=user_id, wakes_agent=wakes_agent, account_id=run_id)
        await self._dispatcher.refresh()
        calls = self._dispatcher.for_run(scope, entries)
        request = RunRequest(
            run_id=run_id,
            chat_key=chat.chat_key,
            container_key=chat.container_key,
            code=code,
            methods=calls.stubs,
            dispatch=calls.dispatch,
            wall_seconds=wall_seconds,
            on_output=on_output,
        )
        async with self._meter.running(run_id, chat=chat, user_id=user_id) as measured:
            with span("sandbox.run", {"run_id": request.run_id}) as part:
                result = await manager.run(request)
                part.set_attributes(stop_type=result.stop_type.name)
            measured.seconds = result.duration_seconds
        return CodeReport(
            stop_type=result.stop_type,
            output=result.output,
            error=result.error,
            calls=[call_json(record) for record in calls.records],
            has_detached=any(record.is_detached for record in calls.records),
            follow_ups=[
                {"round_id": record.round_id, "method": record.method}
                for record in calls.records
                if record.round_id is not None
            ],
        )
