"""Reads settings from files: ``NEKRO_DATABASE__URL_FILE=/run/secrets/url``.

Container engines provide secrets as files, which unlike variables do not appear in process
listings or in ``docker inspect``.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Final

from pydantic_settings import BaseSettings, EnvSettingsSource

from nekro_agent.errors import SettingsError

__all__ = ["FILE_SUFFIX", "EnvironmentSource", "named_by_file", "read_setting_files"]

FILE_SUFFIX: Final = "_FILE"
_MAX_BYTES: Final = 64 << 10


def named_by_file(name: str, known: Collection[str]) -> bool:
    """Whether an upper-case variable is ``<a setting>_FILE``."""
    return name.endswith(FILE_SUFFIX) and name.removesuffix(FILE_SUFFIX) in known


def read_setting_files(environ: Mapping[str, str], known: Collection[str]) -> dict[str, str]:
    """Read the files that variables name; returns setting to content without trailing line breaks.

    Raises:
        SettingsError: a file cannot be read or is too large, or a setting is set in both ways.
    """
    values = {}
    names = {name.upper(): name for name in environ}
    for upper, name in names.items():
        if not named_by_file(upper, known) or not environ[name]:
            continue
        setting = upper.removesuffix(FILE_SUFFIX)
        if setting in names:
            raise SettingsError(f"{setting} and {upper} are both set; keep one of them")
        values[setting] = _content(upper, Path(environ[name]))
    return values


def _content(variable: str, path: Path) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_BYTES + 1)
        text = data.decode()
    except (OSError, UnicodeDecodeError) as exc:
        reason = exc.strerror if isinstance(exc, OSError) else "it is not UTF-8 text"
        raise SettingsError(f"{variable}: cannot read {path}: {reason}") from exc
    if len(data) > _MAX_BYTES:
        raise SettingsError(f"{variable}: {path} has more than {_MAX_BYTES} bytes; is it the right file?")
    return text.rstrip("\r\n")


class EnvironmentSource(EnvSettingsSource):
    """The environment, with ``_FILE`` variables replaced by the contents of their files."""

    def __init__(self, settings_cls: type[BaseSettings], *, known: Collection[str]) -> None:
        """Read the environment.

        Args:
            known: upper-case names of every setting's variable.
        """
        self._known = known
        super().__init__(settings_cls)

    def _load_env_vars(self) -> Mapping[str, str | None]:
        named = {
            name: value for name, value in os.environ.items() if not named_by_file(name.upper(), self._known)
        }
        values = named | read_setting_files(os.environ, self._known)
        return {name.lower(): value for name, value in values.items()}
