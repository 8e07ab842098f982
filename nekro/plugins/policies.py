"""Builds from the settings what plugins may install and read."""

from __future__ import annotations

import json

from pydantic import SecretStr

from broker_config.model_groups import ModelGroup, model_groups
from broker_config.settings import PluginSettings, Settings
from nekro_agent.policies import CoreConfig, ModelConfigGroup, PackagePolicy

__all__ = ["core_config", "package_policy"]

#: Prompts show messages of any age that are not deleted; plugins want a number.
_EVER_DAYS = 3650


def package_policy(settings: PluginSettings) -> PackagePolicy:
    """Return what ``dynamic_import_pkg`` may install, also during the import of plugins."""
    return PackagePolicy(allow=tuple(settings.package_allow))


def core_config(settings: Settings) -> CoreConfig:
    """Return what plugins read as ``core.config``; the agent's model is group ``default``."""
    llm, agent = settings.llm, settings.agent
    groups = {
        name: _plugin_group(group)
        for name, group in model_groups(settings).items()
        if group.base_url and group.model
    }
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


def _plugin_group(group: ModelGroup) -> ModelConfigGroup:
    further = dict(group.parameters)
    temperature, top_p = further.pop("temperature", None), further.pop("top_p", None)
    return ModelConfigGroup(
        GROUP_NAME=group.name,
        CHAT_MODEL=group.model,
        CHAT_PROXY=group.proxy or "",
        BASE_URL=group.base_url or "",
        API_KEY=_plain(group.api_key),
        MODEL_TYPE="embedding" if group.embedding else "draw" if group.draw else "chat",
        ENABLE_VISION=group.vision,
        TEMPERATURE=temperature,
        TOP_P=top_p,
        EXTRA_BODY=json.dumps(further) if further else None,
    )


def _plain(secret: SecretStr | None) -> str:
    return secret.get_secret_value() if secret else ""
