"""Runs of code that calls methods, outside of a round: in a sandbox here, or sent to a rounds worker.

Reports of runs and rows of rounds have their calls as JSON data."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Self

from broker_config.settings import Settings
from broker_config.topology import RUN_TASK
from nekro.app.budgets import day_of
from nekro.app.calls.dispatch import CallScope, Dispatcher
from nekro.app.calls.run_calls import Program, RunCalls
from nekro.app.catalogue import WAIT_TASKS, CatalogueReader
from nekro.app.chats.writer import context_of
from nekro.app.spending import Spending
from nekro.base.tasks import complete
from nekro.broker.calls import MethodCaller
from nekro.broker.tracing import span
from nekro.plugins.entry_registry import Registry
from nekro.sandbox.models import RunRequest, StopType
from nekro.wire.invocation import new_id
from nekro.wire.values import decode_value, encode_arguments
from nekro_agent.errors import ResultError, SandboxError
from nekro_agent.methods import Lane
from nekro_agent.ports import ChatInfo
from nekro_agent.shared_clock import shared_time
from storage.accounts.spendings import NewSpending, user_scope
from storage.repositories.calls import Call
from storage.states import CallState

if TYPE_CHECKING:
    from nekro.app.calls.run_calls import CallRecord
    from nekro.sandbox.manager import SandboxManager
    from nekro.sandbox.models import RunResult

__all__ = [
    "CodeReport",
    "CodeRuns",
    "RemoteRuns",
    "call_json",
    "listed_calls",
]


def call_json(record: CallRecord) -> dict[str, Any]:
    """Describe a call as its caller saw it; times are ISO 8601 in UTC, None if unknown.

    ``awaits_approval`` says whether it waits for approval, and ``is_waiting`` whether its program waits in it
    for something else: when its caller ended; in ``listed_calls``: now. ``approval_id`` is its request for
    approval.
    """
    return {
        "id": record.call_id,
        "method": record.method,
        "called_as": record.called_as,
        "type": record.type.value,
        "lane": record.lane,
        "worker": record.worker,
        "requested_at": _text(record.requested_at),
        "started_at": _text(record.started_at),
        "finished_at": _text(record.finished_at),
        "duration_ms": round(record.duration_ms, 3),
        "error": record.error,
        "follow_up": record.round_id,
        "awaits_approval": record.approval_id is not None,
        "approval_id": record.approval_id,
        "is_waiting": record.is_waiting,
        "read": record.read,
    }


def listed_calls(
    listed: Sequence[dict[str, Any]], rows: Sequence[Call], approvals: Mapping[str, str]
) -> list[dict[str, Any]]:
    """Complete a round's own list of its calls with the recorded rows.

    The caller does not know which worker failed a call, and a caller that died left no list.

    Args:
        listed: results of ``call_json``.
        rows: recorded calls of the round (all but TOOL calls).
        approvals: ids of the requests for approval of these, by call id.
    """
    known = {row.id: row for row in rows}
    calls = [_completed(call, known.pop(call["id"], None)) for call in listed]
    calls += [_recorded(row) for row in known.values()]
    calls = [{**call, "approval_id": approvals.get(call["id"])} for call in calls]
    return sorted(calls, key=lambda call: call["requested_at"])


def _completed(call: dict[str, Any], row: Call | None) -> dict[str, Any]:
    if row is None:
        return {"awaits_approval": False, **call}
    times = {"started_at": _text(row.started_at), "finished_at": _text(row.finished_at)}
    missing = {name: value for name, value in {"worker": row.worker, **times}.items() if not call[name]}
    return call | missing | _waiting(row)


def _waiting(row: Call) -> dict[str, bool]:
    is_awaiting, is_wait = row.state is CallState.AWAITING, row.method in WAIT_TASKS
    return {"awaits_approval": is_awaiting and not is_wait, "is_waiting": is_awaiting and is_wait}


def _recorded(row: Call) -> dict[str, Any]:
    lasted = None
    if row.started_at is not None and row.finished_at is not None:
        lasted = round((row.finished_at - row.started_at).total_seconds() * 1000, 3)
    return {
        "id": row.id,
        "method": row.method,
        "type": row.type.value,
        "lane": row.lane,
        "worker": row.worker or "",
        "requested_at": _text(row.requested_at),
        "started_at": _text(row.started_at),
        "finished_at": _text(row.finished_at),
        "duration_ms": lasted,
        "error": _error(row),
        "follow_up": None,
        **_waiting(row),
    }


def _error(row: Call) -> str | None:
    if row.state in (CallState.DONE, CallState.AWAITING):
        return None
    if row.error_type is None:
        return f"({row.state.value})"
    return f"{row.error_type}: {row.error_message or ''}"


def _text(moment: datetime | None) -> str | None:
    return None if moment is None else moment.isoformat()


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
        spending: Spending,
        *,
        wall_seconds: float,
    ) -> None:
        """Create it.

        Args:
            wall_seconds: longest run.
        """
        self._dispatcher = dispatcher
        self._registry = registry
        self._sandboxes = sandboxes
        self._spending = spending
        self._wall_seconds = wall_seconds

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
            run_id: the id that a key of the API pays for; None makes a new one.
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
        calls = RunCalls(self._dispatcher, scope, entries, program=Program(run_id=run_id))
        request = RunRequest(
            run_id=run_id,
            chat_key=chat.chat_key,
            container_key=chat.container_key,
            code=code,
            methods=calls.stubs,
            dispatch=calls.dispatch,
            call_id=calls.id_of,
            wall_seconds=wall_seconds,
            on_output=on_output,
            seed=calls.seed,
        )
        result = await self._metered(manager, request, chat, user_id)
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

    async def _metered(
        self, manager: SandboxManager, request: RunRequest, chat: ChatInfo, user_id: str | None
    ) -> RunResult:
        """Run code and count its time; the key that started it pays."""
        entry = NewSpending(
            id=f"run:{request.run_id}",
            day=day_of(shared_time()),
            chat_key=chat.chat_key,
            user_id=user_scope(chat.adapter_key, user_id),
            sandbox_seconds=self._wall_seconds,
        )
        meter = self._spending.meter(entry, key=await self._spending.paying_key(request.run_id))
        await meter.admit()
        began, seconds = time.monotonic(), None
        try:
            with span("sandbox.run", {"run_id": request.run_id}) as part:
                result = await manager.run(request)
                part.set_attributes(stop_type=result.stop_type.name)
            seconds = result.duration_seconds
        except SandboxError:
            seconds = 0.0  # it did not run
            raise
        finally:
            used = time.monotonic() - began if seconds is None else seconds
            await complete(meter.settle_alone(sandbox_seconds=used))
        return result


class RemoteRuns:
    """Sends code to rounds workers."""

    def __init__(self, caller: MethodCaller, catalogue: CatalogueReader, settings: Settings) -> None:
        self._caller = caller
        self._catalogue = catalogue
        self._return_bytes = settings.sandbox.return_bytes
        self._default_seconds = settings.workers.call_timeout_seconds + settings.sandbox.wall_seconds

    async def have_worker(self) -> bool:
        """Whether a rounds worker is live.

        Raises:
            StorageUnavailableError: the database does not answer.
        """
        catalogue = await self._catalogue.read()
        return any(worker.is_live and worker.lane == Lane.ROUNDS for worker in catalogue.workers)

    async def run(
        self,
        code: str,
        *,
        run_id: str,
        chat: ChatInfo,
        user_id: str | None,
        wakes_agent: bool,
        timeout_seconds: float | None = None,
    ) -> CodeReport:
        """Run code on a rounds worker, once per run id; cancelling the wait stops the run.

        Args:
            run_id: also the id of its Celery task.
            timeout_seconds: from now to the end of the run; None means the time limit of a run and, for the
                wait for a free worker, that of a call.

        Raises:
            SandboxUnavailableError, SandboxError, BudgetExceededError: the code did not run.
            ArgumentError: the code is too long or not valid Unicode.
            The errors of ``MethodCaller.call``.
        """
        seconds = self._default_seconds if timeout_seconds is None else timeout_seconds
        invocation = CallScope(chat=chat, user_id=user_id, wakes_agent=wakes_agent).call(
            RUN_TASK,
            encode_arguments((code,), {}),
            call_id=run_id,
            deadline=shared_time() + timedelta(seconds=seconds),
        )
        envelope = await self._caller.call(invocation, lane=Lane.ROUNDS)
        return CodeReport.from_plain(decode_value(envelope.value or "", max_bytes=self._return_bytes))
