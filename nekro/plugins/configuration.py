"""The configuration of plugins: an operator reads and changes it in a worker, which has its class.

Secrets stay here: a caller learns only whether one is set. A field is secret if its type is ``SecretStr`` or
``SecretBytes``, or its ``ExtraField`` says so. The settings decide what plugins may install and read."""

from __future__ import annotations

import asyncio
import fcntl
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, get_args

from pydantic import BaseModel, SecretBytes, SecretStr, ValidationError
from pydantic.fields import FieldInfo

from broker_config.model_groups import ModelGroup, model_groups
from broker_config.settings import FileSettings, Settings
from nekro.base.plain import to_plain
from nekro_agent import layout, runtime
from nekro_agent.config import ConfigBase
from nekro_agent.errors import InvalidValueError, NotFoundError
from nekro_agent.files import staging
from nekro_agent.plugin import NekroPlugin
from nekro_agent.runtime import CoreConfig, ModelConfigGroup, PackagePolicy

if TYPE_CHECKING:
    from nekro.plugins.data_dirs import PluginDirs

__all__ = [
    "change_config",
    "core_config",
    "describe_config",
    "package_policy",
    "plugin_dirs",
    "read_config",
]


_SECRETS: Final = (SecretStr, SecretBytes)


async def read_config(plugin: NekroPlugin) -> dict[str, Any]:
    """As ``describe_config``, also of what another host has just saved."""
    async with _newest():
        return describe_config(plugin)


def describe_config(plugin: NekroPlugin) -> dict[str, Any]:
    """Return ``{"schema", "values", "secrets"}`` of a plugin's configuration, without secrets.

    Raises:
        NotFoundError: the plugin has no configuration.
    """
    config = _config_of(plugin)
    secrets: dict[str, bool] = {}
    values = _shown(config, "", secrets)
    schema = type(config).model_json_schema()
    _without_defaults(schema, {path.rpartition(".")[2] for path in secrets})
    return {"schema": schema, "values": values, "secrets": secrets}


async def change_config(plugin: NekroPlugin, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Replace fields of a plugin's configuration and save it; returns what ``describe_config`` does.

    Other workers read it before their next call or hook of the plugin; those of other hosts that share no
    disk have it within a second.

    Raises:
        ConflictError: another host has just saved it; nothing was changed.
        NotFoundError: the plugin has no configuration.
        InvalidValueError: a field does not exist, or a value does not fit; nothing was changed.
    """
    config = _config_of(plugin)
    unknown = sorted(set(changes) - set(type(config).model_fields))
    if unknown:
        raise InvalidValueError(f"{plugin.key} has no configuration field {', '.join(map(repr, unknown))}")
    async with _alone(plugin.key), _newest():
        current = _config_of(plugin)  # as another process may just have saved it
        known = {name: getattr(current, name) for name in type(current).model_fields}
        try:
            new = type(current).model_validate({**known, **changes})
        except ValidationError as exc:
            faults = (f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in exc.errors())
            raise InvalidValueError(f"configuration of {plugin.key}: {'; '.join(faults)}") from None
        plugin.save_config(new)
    return describe_config(plugin)


def _config_of(plugin: NekroPlugin) -> ConfigBase:
    if plugin.config_file is None:
        raise NotFoundError(f"plugin {plugin.key!r} has no configuration")
    return plugin.config_file.refreshed()


def _shown(config: BaseModel, prefix: str, secrets: dict[str, bool]) -> dict[str, Any]:
    shown = {}
    for name, field in type(config).model_fields.items():
        value = getattr(config, name)
        if _is_secret(field) or isinstance(value, _SECRETS):
            plain = value.get_secret_value() if isinstance(value, _SECRETS) else value
            secrets[prefix + name] = bool(plain)
        else:
            shown[name] = _shown_value(value, f"{prefix}{name}.", secrets)
    return shown


def _shown_value(value: Any, prefix: str, secrets: dict[str, bool]) -> Any:
    if isinstance(value, BaseModel):
        return _shown(value, prefix, secrets)
    if isinstance(value, Mapping):
        return {str(key): _shown_value(item, f"{prefix}{key}.", secrets) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_shown_value(item, f"{prefix}{number}.", secrets) for number, item in enumerate(value)]
    if isinstance(value, _SECRETS):
        secrets[prefix.removesuffix(".")] = bool(value.get_secret_value())
        return None
    return to_plain(value)


def _is_secret(field: FieldInfo) -> bool:
    extra = field.json_schema_extra
    marked = isinstance(extra, dict) and bool(extra.get("is_secret"))
    return (
        marked or field.annotation in _SECRETS or any(kind in get_args(field.annotation) for kind in _SECRETS)
    )


def _without_defaults(schema: Any, names: set[str]) -> None:
    """Remove the defaults and examples of secret fields from a schema and its definitions."""
    if isinstance(schema, list):
        for item in schema:
            _without_defaults(item, names)
    if not isinstance(schema, dict):
        return
    for name, field in schema.get("properties", {}).items():
        if isinstance(field, dict) and (name in names or field.get("is_secret") or field.get("writeOnly")):
            for hidden in ("default", "examples", "example"):
                field.pop(hidden, None)
    for item in schema.values():
        _without_defaults(item, names)


@asynccontextmanager
async def _alone(plugin_key: str) -> AsyncIterator[None]:
    """Let one process of the installation change the configuration at a time."""
    path = (
        layout.locks_dir(runtime.data_root())
        / layout.config_file(Path(), plugin_key).with_suffix(".lock").name
    )
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with path.open("w") as file:
        await asyncio.to_thread(fcntl.flock, file, fcntl.LOCK_EX)
        yield


@asynccontextmanager
async def _newest() -> AsyncIterator[None]:
    """Let the block have the configurations that other hosts have saved, and commit what it saves."""
    async with staging.call_scope("plugin configuration"):
        if runtime.is_bound() and (areas := runtime.current().areas).is_synced:
            await asyncio.to_thread(areas.configs_dir)
        yield


#: Prompts show messages of any age that are not deleted; plugins want a number.
_EVER_DAYS = 3650


def package_policy(settings: Settings) -> PackagePolicy:
    """Return what ``dynamic_import_pkg`` may install, also during the import of plugins."""
    allow = tuple(settings.plugins.package_allow)
    if not settings.files.in_store:
        return PackagePolicy(allow=allow)
    from nekro.plugins.stored_packages import StoredPackages

    return PackagePolicy(allow=allow, fleet=StoredPackages(settings))


def plugin_dirs(settings: FileSettings) -> PluginDirs | None:
    """Return what chooses policies of data directories; None where hosts share a disk."""
    if not settings.in_store:
        return None
    from nekro.plugins.data_dirs import PluginDirs

    return PluginDirs(settings.plugin_dirs)


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
