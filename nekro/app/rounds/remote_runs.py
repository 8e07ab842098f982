"""Sends code to rounds workers."""

from __future__ import annotations

from datetime import timedelta

from broker_config.settings import Settings
from broker_config.topology import RUN_TASK
from nekro.app.calls.dispatch import CallScope
from nekro.app.catalogue.fleet import CatalogueReader
from nekro.app.rounds.runs import CodeReport
from nekro.broker.calls import MethodCaller
from nekro.wire.values import decode_value, encode_arguments
from nekro_agent.methods import Lane
from nekro_agent.ports import ChatInfo
from nekro_agent.shared_clock import shared_time

__all__ = ["RemoteRuns"]


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
        invocation = CallScope(chat=chat, user_id=user_id, wakes_agent=wakes_agent).invocation(
            RUN_TASK,
            encode_arguments((code,), {}),
            call_id=run_id,
            deadline=shared_time() + timedelta(seconds=seconds),
        )
        envelope = await self._caller.call(invocation, lane=Lane.ROUNDS)
        return CodeReport.from_plain(decode_value(envelope.value or "", max_bytes=self._return_bytes))
