"""Runs code for the tool `run_code`: a gateway on rounds workers, as `POST /runs` does."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, TypeAlias

from mcp_types import CallToolResult

from nekro.app.composition import Services
from nekro.extensions.mcp.server.callers import Caller
from nekro.extensions.mcp.server.jobs import awaiting_text
from nekro.extensions.mcp.server.results import data_result
from nekro.gateway.access.budgets import begin_paying
from nekro.gateway.identity import Scope
from nekro.gateway.rounds import require_rounds_worker
from nekro.gateway.views import run_answer
from nekro_client.models import Run

if TYPE_CHECKING:
    from nekro.app.rounds.runs import CodeReport
    from storage.access.approvals import Approval

__all__ = ["CodeRun", "on_workers", "run_code"]

#: Runs code of a caller, without a round for its AGENT result; the text is the id of the run.
CodeRun: TypeAlias = "Callable[[Caller, str, str], Awaitable[CodeReport]]"
#: Stop types of code that did what it should.
_ENDS = frozenset({"NORMAL", "AGENT", "MULTIMODAL_AGENT", "MANUAL", "APPROVAL"})


async def run_code(
    services: Services, run: CodeRun, caller: Caller, code: str, *, run_id: str
) -> CallToolResult:
    """Run code; cancelling the wait stops it.

    Raises:
        ProblemError: the key may not run code.
        The errors of ``run``.
    """
    caller.identity.require(Scope.RUN, chat_key=caller.chat_key)
    ran = run_answer(run_id, await run(caller, code, run_id))
    waiting = [call.approval_id for call in ran.calls if call.approval_id and call.state == "awaiting"]
    async with services.database.read() as transaction:
        return _result(ran, [await transaction.approvals.get(one) for one in waiting])


def on_workers(services: Services) -> CodeRun:
    """Return what runs code on rounds workers, once per run id.

    It raises a ProblemError if no worker is live, and a NekroError if the code did not run.
    """

    async def run(caller: Caller, code: str, run_id: str) -> CodeReport:
        await begin_paying(services, caller.identity, run_id, code)
        await require_rounds_worker(services)
        chat = await services.chat(caller.chat_key)
        return await services.remote_runs.run(
            code, run_id=run_id, chat=chat, user_id=caller.user_id, wakes_agent=False
        )

    return run


def _result(run: Run, waiting: Sequence[Approval]) -> CallToolResult:
    text = run.output if run.error is None else f"{run.output}\n{run.error}".lstrip("\n")
    for row in waiting:
        text = f"{text}\n[{awaiting_text(row)}]".lstrip("\n")
    if run.stop_type != "NORMAL":
        text = f"{text}\n[the run ended with {run.stop_type}]".lstrip("\n")
    return data_result(run.model_dump(mode="json"), text, is_error=run.stop_type not in _ENDS)
