"""Creates the client that the settings select."""

from __future__ import annotations

import json

from broker_config.model_groups import DEFAULT_GROUP, ModelGroup
from broker_config.settings import LLMSettings, Settings
from nekro.agent.llm.port import LLMClient
from nekro.agent.llm.router import ModelRouter
from nekro.agent.llm.scripted_client import ScriptedClient
from nekro_agent.errors import LLMError

__all__ = ["create_client", "create_models"]


def create_client(settings: LLMSettings) -> LLMClient:
    """Build the configured client; a script has priority over an endpoint.

    Raises:
        LLMError: neither is configured, or the script cannot be read.
    """
    if settings.script is not None:
        return ScriptedClient(
            settings.script,
            record=settings.record,
            input_price=settings.input_price_per_million,
            output_price=settings.output_price_per_million,
        )
    if settings.base_url and settings.model:
        # Imported here because the package takes 0.3 s to import and a script does not need it.
        from nekro.agent.llm.endpoint_client import EndpointClient

        return EndpointClient(settings)
    if settings.base_url:
        raise LLMError(f"NEKRO_LLM__BASE_URL is {settings.base_url}, but NEKRO_LLM__MODEL names no model")
    raise LLMError(
        "no language model is configured: set NEKRO_LLM__BASE_URL and NEKRO_LLM__MODEL (and "
        "NEKRO_LLM__API_KEY where the endpoint wants one), or NEKRO_LLM__SCRIPT to replay answers "
        "from a YAML file"
    )


def create_models(settings: Settings) -> LLMClient:
    """Build the client of all model groups; a script answers for every group.

    Raises:
        LLMError: no model is configured for the group ``default``, or the script cannot be read.
    """
    if settings.llm.script is not None:
        return create_client(settings.llm)
    return ModelRouter(settings, lambda group: _group_client(settings.llm, group))


def _group_client(llm: LLMSettings, group: ModelGroup) -> LLMClient:
    if group.name == DEFAULT_GROUP:
        return create_client(llm)
    # Imported here as above.
    from nekro.agent.llm.endpoint_client import EndpointClient

    return EndpointClient(endpoint_of(llm, group), group=group.name)


def endpoint_of(llm: LLMSettings, group: ModelGroup) -> LLMSettings:
    """Return the settings of a group's endpoint; what groups do not set is as in ``NEKRO_LLM__…``."""
    return llm.model_copy(
        update={
            "base_url": group.base_url,
            "protocol": group.protocol,
            "api_key": group.api_key,
            "model": group.model,
            "temperature": None,
            "max_output_tokens": None,
            "parameters": json.dumps(dict(group.parameters)),
            "proxy": group.proxy,
            "first_token_timeout_seconds": group.first_token_seconds,
            "idle_timeout_seconds": group.idle_seconds,
            "input_price_per_million": group.input_price,
            "cached_input_price_per_million": group.cached_input_price,
            "output_price_per_million": group.output_price,
        }
    )
