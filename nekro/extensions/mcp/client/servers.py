"""The declared MCP servers of an installation: those of ``mcp.json`` and those of the database."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from broker_config.secret_files import secret_paths
from nekro.extensions.mcp.client.declarations import Declaration, module_names, parse
from nekro.extensions.mcp.client.tools import ListedTool, read_tools
from nekro_agent.errors import InvalidValueError

if TYPE_CHECKING:
    from broker_config.settings import Settings
    from storage.engine import Database
    from storage.outbound.mcp_servers import StoredServer

__all__ = ["AUTHOR", "McpServer", "Source", "file_path", "merged", "read_file", "read_servers"]

#: Author of the plugins of servers.
AUTHOR: Final = "mcp"
_KEY: Final = "mcpServers"
_MOST_FILE_BYTES: Final = 1 << 20
_MOST_SERVERS: Final = 200


class Source(StrEnum):
    """Where a server is declared."""

    FILE = "file"
    DATABASE = "database"


@dataclass(frozen=True, kw_only=True)
class McpServer:
    """One declared server, with what workers know about it."""

    name: str
    #: Name of the plugin's module: the plugin is ``mcp.<module>``.
    module: str
    source: Source
    #: Whether the database declares it too; the file wins.
    is_in_both: bool = False
    #: None if it is faulty; then ``error`` says why.
    declaration: Declaration | None
    is_enabled: bool
    #: What was stored at the last listing; None before.
    tools_text: str | None = None
    about: Mapping[str, Any] | None = None
    #: Whether the tools were listed with this declaration.
    is_current: bool = False
    listed_at: datetime | None = None
    error: str | None = None
    revision: int = 0

    @property
    def plugin_key(self) -> str:
        """Key of its plugin."""
        return f"{AUTHOR}.{self.module}"

    @cached_property
    def tools(self) -> tuple[ListedTool, ...]:
        """The tools as they were listed last."""
        return () if self.tools_text is None else read_tools(self.tools_text)

    @property
    def identity(self) -> object:
        """What determines its plugin."""
        digest = self.declaration.digest if self.declaration is not None else None
        return self.module, digest, self.is_enabled, self.tools_text, self.error


def file_path(settings: Settings) -> Path:
    """Return where ``mcp.json`` is looked for."""
    return settings.mcp.file or settings.data_dir / "mcp.json"


def read_file(path: Path) -> dict[str, Any]:
    """Return the entries of the file by name; none if there is no file.

    Raises:
        InvalidValueError: it cannot be read or is malformed; the message names it.
    """
    try:
        with path.open("rb") as file:
            content = file.read(_MOST_FILE_BYTES + 1)
    except FileNotFoundError:
        return {}
    except OSError as exc:
        raise InvalidValueError(f"{path} cannot be read: {exc.strerror}") from exc
    if len(content) > _MOST_FILE_BYTES:
        raise InvalidValueError(f"{path} has more than {_MOST_FILE_BYTES} bytes")
    try:
        document = json.loads(content.decode("utf-8-sig"))
        servers = document[_KEY]
        if not isinstance(servers, dict):
            raise TypeError
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as exc:
        raise InvalidValueError(f"{path} is not JSON: {exc}") from None
    except (KeyError, TypeError):
        raise InvalidValueError(f'{path} must be {{"{_KEY}": {{name: declaration, …}}}}') from None
    if len(servers) > _MOST_SERVERS:
        raise InvalidValueError(f"{path} declares {len(servers)} servers; the limit is {_MOST_SERVERS}")
    return servers


def merged(
    entries: Mapping[str, Any], rows: list[StoredServer], *, secrets: Mapping[Path, str]
) -> list[McpServer]:
    """Return every declared server, ordered by name.

    Args:
        entries: those of the file, by name.
        secrets: as of ``parse``.
    """
    stored = {row.name: row for row in rows}
    names = {*entries, *(row.name for row in rows if row.declaration is not None)}
    modules = module_names(names)
    return [_server(name, modules[name], entries, stored.get(name), secrets) for name in sorted(names)]


async def read_servers(settings: Settings, database: Database) -> list[McpServer]:
    """Return the servers that a worker with these settings has.

    Raises:
        InvalidValueError: the file is malformed.
        StorageUnavailableError: the database does not answer.
    """
    entries = read_file(file_path(settings))
    async with database.read() as transaction:
        rows = await transaction.mcp_servers.all()
    return merged(entries, rows, secrets=secret_paths(settings))


def _server(
    name: str,
    module: str,
    entries: Mapping[str, Any],
    row: StoredServer | None,
    secrets: Mapping[Path, str],
) -> McpServer:
    is_in_file = name in entries
    declared = entries[name] if is_in_file else row.declaration if row is not None else None
    declaration, error, is_enabled = None, None, True
    try:
        declaration, is_enabled = parse(name, declared, secrets=secrets)
    except InvalidValueError as exc:
        error = str(exc)
    if row is not None and not is_in_file:
        is_enabled = is_enabled and row.is_enabled
    is_current = row is not None and declaration is not None and row.listed_digest == declaration.digest
    return McpServer(
        name=name,
        module=module,
        source=Source.FILE if is_in_file else Source.DATABASE,
        is_in_both=is_in_file and row is not None and row.declaration is not None,
        declaration=declaration,
        is_enabled=is_enabled,
        tools_text=row.tools if row is not None else None,
        about=row.about if row is not None else None,
        is_current=is_current,
        listed_at=row.listed_at if row is not None else None,
        error=error or (row.error if row is not None and is_current else None),
        revision=row.revision if row is not None else 0,
    )
