"""Builds from the settings what plugins may install and read."""

from __future__ import annotations

from pydantic import SecretStr

from broker_config.model_groups import ModelGroupSettings
from broker_config.settings import LLMSettings, PluginSettings, Settings
from nekro_agent.policies import CoreConfig, ModelConfigGroup, PackagePolicy

__all__ = ["core_config", "package_policy"]

_GROUP = "default"
#: Prompts show messages of any age that are not deleted; plugins want a number.
_EVER_DAYS = 3650


def package_policy(settings: PluginSettings) -> PackagePolicy:
    """Return what ``dynamic_import_pkg`` may install, also during the import of plugins."""
    return PackagePolicy(allow=tuple(settings.package_allow))


def core_config(settings: Settings) -> CoreConfig:
    """Return what plugins read as ``core.config``; the agent's model is group ``default``."""
    llm, agent = settings.llm, settings.agent
    groups = {_GROUP: _default_group(llm)} if llm.base_url and llm.model else {}
    groups |= {name: _model_group(name, group, llm) for name, group in settings.model_groups.items()}
    kept_days = settings.retention.messages_days or _EVER_DAYS
    return CoreConfig(
        MODEL_GROUPS=groups,
        AI_CHAT_PRESET_SETTING=agent.persona,
        AI_CHAT_CONTEXT_EXPIRE_SECONDS=int(kept_days * 86_400),
        AI_CHAT_CONTEXT_MAX_LENGTH=agent.history_messages,
        AI_DEBOUNCE_WAIT_SECONDS=agent.debounce_seconds,
        AI_GENERATE_TIMEOUT=int(llm.timeout_seconds),
        AI_SCRIPT_MAX_RETRY_TIMES=agent.rounds_per_turn,
        SANDBOX_RUNNING_TIMEOUT=int(settings.sandbox.wall_seconds),
        QDRANT_URL=settings.qdrant.url or "",
        QDRANT_API_KEY=_plain(settings.qdrant.api_key),
    )


def _default_group(llm: LLMSettings) -> ModelConfigGroup:
    return ModelConfigGroup(
        GROUP_NAME=_GROUP,
        CHAT_MODEL=llm.model,
        BASE_URL=llm.base_url or "",
        API_KEY=_plain(llm.api_key),
        ENABLE_VISION=llm.vision,
        TEMPERATURE=llm.temperature,
    )


def _model_group(name: str, group: ModelGroupSettings, llm: LLMSettings) -> ModelConfigGroup:
    # The agent's key goes to the agent's endpoint only.
    key = group.api_key if group.base_url else group.api_key or llm.api_key
    return ModelConfigGroup(
        GROUP_NAME=name,
        CHAT_MODEL=group.model,
        CHAT_PROXY=group.proxy or "",
        BASE_URL=group.base_url or llm.base_url or "",
        API_KEY=_plain(key),
        MODEL_TYPE=group.type,
        ENABLE_VISION=group.vision,
        TEMPERATURE=group.temperature,
        TOP_P=group.top_p,
        EXTRA_BODY=group.extra_body,
    )


def _plain(secret: SecretStr | None) -> str:
    return secret.get_secret_value() if secret else ""
