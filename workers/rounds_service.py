"""What only a rounds worker has: the model, the drain, and the sweep that finds lost work."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agent.llm import LLMClient, create_client
from agent.rounds import RoundRunner
from workers.round_input import RoundInputs
from workers.rounds import RoundDrain
from workers.sweeper import Sweeper
from workers.sweeps import JobSweep, TimerSweep

if TYPE_CHECKING:
    from workers.composition import Services

__all__ = ["RoundsService"]


class RoundsService:
    """Lives as long as the worker's loop."""

    def __init__(self, *, llm: LLMClient, drain: RoundDrain, sweeper: Sweeper) -> None:
        self._llm = llm
        self.drain = drain
        self._sweeper = sweeper

    @classmethod
    async def start(cls, services: Services) -> RoundsService:
        """Build and start it.

        Raises:
            LLMError: no model is configured.
            SandboxUnavailableError: nothing isolates code here as the settings ask.
        """
        settings = services.settings
        llm = create_client(settings.llm)
        runner = RoundRunner(
            llm=llm,
            sandbox=await services.sandboxes(),
            agent_settings=settings.agent,
            sandbox_settings=settings.sandbox,
            redact=services.redactor,
        )
        drain = RoundDrain(
            database=services.database,
            publisher=services.publisher,
            runner=runner,
            inputs=RoundInputs(services.database, services.registry, services.dispatcher, settings.agent),
            redactor=services.redactor,
            settings=settings.agent,
            owner=services.node,
        )
        sweeper = Sweeper(
            services.database,
            services.publisher,
            settings.agent,
            owner=services.node,
            sweeps=(
                TimerSweep(services.database, services.firings).sweep,
                JobSweep(services.database, services.publisher, settings.agent).sweep,
            ),
        )
        sweeper.start()
        return cls(llm=llm, drain=drain, sweeper=sweeper)

    async def close(self) -> None:
        """Stop sweeping and close the model's connections."""
        await self._sweeper.close()
        await self.drain.close()
        await self._llm.close()
