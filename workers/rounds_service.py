"""The services that only a rounds worker has: the model client and the drain."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from broker_config.settings import ApprovalResume, Settings
from nekro.agent.llm import LLMClient, MissingClient
from nekro.agent.llm.clients import create_models
from nekro.agent.rounds import RoundRunner
from nekro.app.model_meters import RoundBudgets
from nekro_agent.errors import LLMError
from workers.rounds.drain import RoundDrain
from workers.rounds.input import PictureLoader, RoundInputs

if TYPE_CHECKING:
    from workers.services import WorkerServices

__all__ = ["RoundsService"]


class RoundsService:
    """Exists as long as the worker's loop."""

    def __init__(self, *, llm: LLMClient, drain: RoundDrain) -> None:
        self._llm = llm
        self.drain = drain

    @classmethod
    async def start(
        cls,
        services: WorkerServices,
        *,
        slots: int,
        is_stopping: Callable[[], bool],
        needs_model: bool = True,
    ) -> RoundsService:
        """Build and start the services.

        Args:
            slots, is_stopping: as in ``RoundDrain``.
            needs_model: whether to refuse to start without a model; else each round fails for that reason.

        Raises:
            LLMError: no model is configured, and it is needed.
            SandboxUnavailableError: this host has no isolation that satisfies the settings.
        """
        settings = services.settings
        llm = _client(settings, needs_model=needs_model)
        runner = RoundRunner(
            llm=llm,
            sandbox=await services.sandboxes(),
            agent_settings=settings.agent,
            sandbox_settings=settings.sandbox,
            contexts=services.model_contexts,
            redact=services.redactor,
        )
        drain = RoundDrain(
            database=services.database,
            leases=services.leases,
            publisher=services.publisher,
            ledger=services.ledger,
            runner=runner,
            inputs=RoundInputs(
                services.database,
                services.registry,
                services.dispatcher,
                services.host,
                PictureLoader(services.settings, services.files_of),
                keep_awake=settings.plugins.keep_awake,
                keeps_variables=settings.sandbox.keep_variables,
                journal_bytes=settings.agent.journal_bytes,
                parks=settings.approval.resume is ApprovalResume.PROGRAM,
                prefetch=services.areas.prefetch,
            ),
            budgets=RoundBudgets(services.spending, settings),
            settings=settings.agent,
            owner=services.node,
            slots=slots,
            is_stopping=is_stopping,
            redact=services.redactor,
            on_rest=services.summaries.chat_rested,
            leaving=services.dispatcher.leaving,
            program_ended=services.dispatcher.program_ended,
        )
        return cls(llm=llm, drain=drain)

    async def close(self) -> None:
        """Cancel delayed announcements, and close the model's connections."""
        await self.drain.close()
        await self._llm.close()


def _client(settings: Settings, *, needs_model: bool) -> LLMClient:
    try:
        return create_models(settings)
    except LLMError as exc:
        if needs_model:
            raise
        return MissingClient(f"{exc}; then start the rounds workers again")
