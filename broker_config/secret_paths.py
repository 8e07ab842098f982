"""Where a host keeps the secrets of the fleet, which no program that an operator declares may see."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from broker_config.setting_files import FILE_SUFFIX
from broker_config.settings import ENV_PREFIX, TEST_PREFIX, Settings

__all__ = ["secret_paths"]

_MCP_FILE: Final = "NEKRO_MCP__FILE"
_SQLITE: Final = re.compile(r"sqlite(?:\+\w+)?:///(?:file:)?([^?#]+)")
_SQLITE_SUFFIXES: Final = ("", "-journal", "-shm", "-wal")


def secret_paths(settings: Settings) -> dict[Path, str]:
    """Return files and directories with secrets, each with what it is.

    Of a file that a setting names, it is the directory: other secrets are beside it, and the name may be a
    link to one of them.
    """
    found = {
        Path("/proc"): "/proc, which shows the variables of workers",
        settings.data_dir.absolute(): "the data directory",
    }
    for name, path in (*_named_by_variables(), *_named_by_settings(settings)):
        found.setdefault(_beside(path.absolute()), f"the directory of the file that {name} names")
    if settings.mcp.file is not None:
        found[settings.mcp.file.absolute()] = f"the file that {_MCP_FILE} names"
    own = Path(".env").absolute()
    if own.is_file():
        found[own] = "the .env of workers"
    if database := _SQLITE.match(settings.database.url or ""):
        path = Path(database[1]).expanduser().absolute()
        found |= {path.with_name(path.name + end): "the database" for end in _SQLITE_SUFFIXES}
    return found


def _named_by_variables() -> Iterator[tuple[str, Path]]:
    for name, value in os.environ.items():
        upper = name.upper()
        is_ours = upper.startswith(ENV_PREFIX) and not upper.startswith(TEST_PREFIX)
        if is_ours and upper.endswith(FILE_SUFFIX) and upper != _MCP_FILE and value:
            yield upper, Path(value)


def _named_by_settings(settings: Settings) -> Iterator[tuple[str, Path]]:
    for name in ("tls_ca_file", "tls_cert_file", "tls_key_file"):
        path = getattr(settings.broker, name)
        if path is not None:
            yield f"{ENV_PREFIX}BROKER__{name.upper()}", path


def _beside(file: Path) -> Path:
    """Return the directory of a file; the file itself if that is the root."""
    return file if file.parent == Path("/") else file.parent
