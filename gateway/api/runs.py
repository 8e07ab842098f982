"""Runs of code in a sandbox."""

from __future__ import annotations

from fastapi import APIRouter, Response

from gateway.access.budgets import require_budget
from gateway.dependencies import IdentityDep, ServicesDep
from gateway.idempotency import OnceDep
from gateway.identity import Scope
from gateway.views import run_answer
from nekro_client.models import Run, RunBody

__all__ = ["router"]

router = APIRouter(tags=["runs"])


@router.post("/runs", response_model=Run)
async def run(body: RunBody, services: ServicesDep, identity: IdentityDep, once: OnceDep) -> Response:
    """Run code in a sandbox, as code of the language model runs, and wait for its end."""
    identity.require(Scope.RUN, chat_key=body.chat_key)
    user_id = identity.user_for(body.user_id)

    async def work() -> Run:
        if body.follow_up:
            identity.require(Scope.POST, chat_key=body.chat_key)
            await require_budget(services.database, identity)
        await services.refresh()
        report = await services.run_code(
            body.code,
            chat_key=body.chat_key,
            user_id=user_id,
            follow_up=body.follow_up,
            file_name="<api>",
        )
        answer = run_answer(report)
        if identity.key_id is not None:
            async with services.database.begin() as transaction:
                for turn_id in answer.follow_ups:
                    await transaction.keys.add_turn(identity.key_id, turn_id)
        return answer

    return await once.run(work, is_repeatable=False)
