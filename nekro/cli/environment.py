"""Settings as environment variables, so that a child process reads the values that its parent resolved."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

from pydantic import BaseModel, SecretStr

from broker_config.settings import ENV_PREFIX, TEST_PREFIX, Settings, known_variables

__all__ = ["environment_of", "setting_text", "setting_value"]


def setting_value(settings: Settings, group: str, variable: str) -> object:
    """Return the value of one of ``known_variables()``."""
    leaf = variable.removeprefix(ENV_PREFIX).lower()
    if not group:
        return getattr(settings, leaf)
    # Settings that were not loaded have no group of an extension, which are its defaults then.
    return getattr(getattr(settings, group, None), leaf.removeprefix(f"{group}__"), None)


def setting_text(value: object) -> str:
    """Format a value for an environment variable: lists as ``a,b``, secrets in plain text, None as "".

    Limits are ``a=1,b=2``, model groups JSON.
    """
    if value is None:
        return ""
    if isinstance(value, SecretStr):
        return value.get_secret_value()
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (tuple, list)):
        return ",".join(setting_text(item) for item in value)
    if isinstance(value, Path):
        return str(value.expanduser().absolute())
    if isinstance(value, Mapping) and all(isinstance(item, float) for item in value.values()):
        return ",".join(f"{name}={limit!r}" for name, limit in value.items())
    if isinstance(value, Mapping):
        return json.dumps({name: _plain(group) for name, group in value.items()}) if value else ""
    if isinstance(value, BaseModel):
        raise TypeError(f"{type(value).__name__} is a group, not a setting")
    return str(value)


def _plain(group: BaseModel) -> dict[str, object]:
    values = group.model_dump(exclude_none=True)
    return {
        name: value.get_secret_value() if isinstance(value, SecretStr) else value
        for name, value in values.items()
    }


def environment_of(settings: Settings, base: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return ``base`` (default: this process's environment) with every setting written out.

    Unset settings are left out, and ``NEKRO_`` variables of ``base`` are removed, except those of the tests.
    """
    kept = os.environ if base is None else base
    result = {
        name: value
        for name, value in kept.items()
        if not name.upper().startswith(ENV_PREFIX) or name.upper().startswith(TEST_PREFIX)
    }
    for variable, group, _ in known_variables():
        value = setting_value(settings, group, variable)
        if value is not None and value != {}:
            result[variable] = setting_text(value)
    return result
