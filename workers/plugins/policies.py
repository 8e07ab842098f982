"""Builds from the settings what plugins may install and read."""

from __future__ import annotations

from broker_config.settings import LLMSettings, PluginSettings, Settings
from nekro_agent.policies import CoreConfig, ModelConfigGroup, PackagePolicy

__all__ = ["core_config", "package_policy"]

_GROUP = "default"


def package_policy(settings: PluginSettings) -> PackagePolicy:
    """Return what ``dynamic_import_pkg`` may install, also during the import of plugins."""
    return PackagePolicy(allow=tuple(settings.package_allow))


def core_config(settings: Settings) -> CoreConfig:
    """Return what plugins read as ``core.config``: the persona, and the model as group ``default``."""
    llm = settings.llm
    groups = {_GROUP: _model_group(llm)} if llm.base_url and llm.model else {}
    return CoreConfig(MODEL_GROUPS=groups, AI_CHAT_PRESET_SETTING=settings.agent.persona)


def _model_group(llm: LLMSettings) -> ModelConfigGroup:
    return ModelConfigGroup(
        GROUP_NAME=_GROUP,
        CHAT_MODEL=llm.model,
        BASE_URL=llm.base_url or "",
        API_KEY=llm.api_key.get_secret_value() if llm.api_key else "",
        TEMPERATURE=llm.temperature,
    )
