"""Runs code for the tool `run_code`, on a rounds worker as `POST /runs` does."""

from __future__ import annotations

from mcp_types import CallToolResult

from gateway.identity import Scope
from gateway.mcp.callers import Caller
from gateway.mcp.results import data_result
from gateway.rounds import require_rounds_worker
from gateway.views import run_answer
from workers.composition import Services

__all__ = ["run_code"]

#: Stop types of code that did what it should.
_ENDS = frozenset({"NORMAL", "AGENT", "MULTIMODAL_AGENT", "MANUAL"})


async def run_code(services: Services, caller: Caller, code: str, *, run_id: str) -> CallToolResult:
    """Run code; an AGENT result ends it and requests no round. Cancelling the wait stops the run.

    Args:
        run_id: a second request with the same id does not run the code again.

    Raises:
        ProblemError: the key may not run code, or no worker runs any.
        NekroError: the code did not run.
    """
    caller.identity.require(Scope.RUN, chat_key=caller.chat_key)
    await require_rounds_worker(services)
    report = await services.remote_runs.run(
        code,
        run_id=run_id,
        chat=await services.chat(caller.chat_key),
        user_id=caller.user_id,
        wakes_agent=False,
    )
    run = run_answer(run_id, report)
    text = run.output if run.error is None else f"{run.output}\n{run.error}".lstrip("\n")
    if run.stop_type != "NORMAL":
        text = f"{text}\n[the run ended with {run.stop_type}]".lstrip("\n")
    return data_result(run.model_dump(mode="json"), text, is_error=run.stop_type not in _ENDS)
