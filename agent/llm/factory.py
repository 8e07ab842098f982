"""Creates the client that the settings select."""

from __future__ import annotations

from agent.llm.port import LLMClient
from agent.llm.scripted_client import ScriptedClient
from broker_config.settings import LLMSettings
from nekro_agent.errors import LLMError

__all__ = ["create_client"]


def create_client(settings: LLMSettings) -> LLMClient:
    """Build the configured client; a script has priority over an endpoint.

    Raises:
        LLMError: neither is configured, or the script cannot be read.
    """
    if settings.script is not None:
        return ScriptedClient(settings.script, record=settings.record)
    if settings.base_url and settings.model:
        # Imported here because the package takes 0.3 s to import and a script does not need it.
        from agent.llm.openai_client import OpenAIClient

        return OpenAIClient(settings)
    if settings.base_url:
        raise LLMError(f"NEKRO_LLM__BASE_URL is {settings.base_url}, but NEKRO_LLM__MODEL names no model")
    raise LLMError(
        "no language model is configured: set NEKRO_LLM__BASE_URL and NEKRO_LLM__MODEL (and "
        "NEKRO_LLM__API_KEY where the endpoint wants one), or NEKRO_LLM__SCRIPT to replay answers "
        "from a YAML file"
    )
