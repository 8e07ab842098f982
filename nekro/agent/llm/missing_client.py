"""The client of a worker that has no model: it runs code for the HTTP API, and its rounds fail."""

from __future__ import annotations

from typing import NoReturn

from nekro.agent.llm.port import LLMRequest
from nekro_agent.errors import LLMError

__all__ = ["MissingClient"]


class MissingClient:
    """Answers every request with the reason why there is no model."""

    def __init__(self, reason: str) -> None:
        """``reason`` is the text of the error; it names the settings."""
        self._reason = reason

    async def complete(self, request: LLMRequest) -> NoReturn:
        """Fail.

        Raises:
            LLMError: always.
        """
        raise LLMError(self._reason)

    async def close(self) -> None:
        """Do nothing."""
