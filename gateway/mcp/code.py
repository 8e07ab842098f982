"""Runs code for the tool `run_code`: the only place here that does."""

from __future__ import annotations

from mcp_types import CallToolResult

from gateway.identity import Scope
from gateway.mcp.callers import Caller
from gateway.mcp.results import data_result
from gateway.views import run_answer
from nekro_client.models import Run
from workers.composition import Services

__all__ = ["run_code"]

#: Stop types of code that did what it should.
_ENDS = frozenset({"NORMAL", "AGENT", "MULTIMODAL_AGENT", "MANUAL"})


async def run_code(services: Services, caller: Caller, code: str) -> CallToolResult:
    """Run code as `POST /runs` does; an AGENT result ends it and requests no round.

    Raises:
        ProblemError: the key may not run code.
        NekroError: the code did not run.
    """
    caller.identity.require(Scope.RUN, chat_key=caller.chat_key)
    run = await _run(services, caller, code)
    text = run.output if run.error is None else f"{run.output}\n{run.error}".lstrip("\n")
    if run.stop_type != "NORMAL":
        text = f"{text}\n[the run ended with {run.stop_type}]".lstrip("\n")
    return data_result(run.model_dump(mode="json"), text, is_error=run.stop_type not in _ENDS)


async def _run(services: Services, caller: Caller, code: str) -> Run:
    await services.refresh()
    report = await services.run_code(
        code, chat_key=caller.chat_key, user_id=caller.user_id, follow_up=False, file_name="<mcp>"
    )
    return run_answer(report)
