"""The declared MCP servers of an installation, those of ``mcp.json`` and of the database, and their listings.

Literal secrets in declarations are found and masked, so that listings, logs and errors do not show them.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import parse_qsl, urlsplit

from broker_config.secret_files import secret_paths
from nekro.base.redaction import Redactor
from nekro.extensions.mcp.client.tools import ListedTool, read_tools
from nekro.extensions.mcp.declarations import Declaration, module_names, parse, referenced, without_references
from nekro_agent.errors import InvalidValueError

if TYPE_CHECKING:
    from broker_config.settings import Settings
    from nekro.extensions.mcp.rows import StoredServer
    from storage.engine import Database

__all__ = [
    "AUTHOR",
    "MASK",
    "McpServer",
    "ServerSource",
    "describe_server",
    "file_path",
    "literal_secrets",
    "merged",
    "read_file",
    "read_servers",
    "redactor_of",
    "secret_warnings",
    "shown",
    "unused_reason",
]


#: Author of the plugins of servers.
AUTHOR: Final = "mcp"

_KEY: Final = "mcpServers"

_MOST_FILE_BYTES: Final = 1 << 20

_MOST_SERVERS: Final = 200


class ServerSource(StrEnum):
    """Where a server is declared."""

    FILE = "file"
    DATABASE = "database"


@dataclass(frozen=True, kw_only=True)
class McpServer:
    """One declared server, with what workers know about it."""

    name: str
    #: Name of the plugin's module: the plugin is ``mcp.<module>``.
    module: str
    source: ServerSource
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
    def digest(self) -> str:
        """That of its declaration; "" if it is faulty."""
        return "" if self.declaration is None else self.declaration.digest

    @property
    def identity(self) -> object:
        """What determines its plugin."""
        return self.module, self.digest, self.is_enabled, self.tools_text, self.error


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
        secrets: see ``parse``.
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
    # Not needed by a worker's template, nor for the help of a command.
    from nekro.extensions.mcp.rows import ServerRows

    entries = read_file(file_path(settings))
    async with database.read() as transaction:
        rows = await ServerRows(transaction.connection).all()
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
        source=ServerSource.FILE if is_in_file else ServerSource.DATABASE,
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


MASK: Final = "[secret]"

_SECRET_KEY: Final = re.compile(
    r"token|secret|passw|pwd|api[-_]?key|access[-_]?key|credential|authorization|auth$|private|signature|session|"
    r"cookie|bearer|(^|[-_])key$|(^|[-_])pat$|dsn$",
    re.IGNORECASE,
)
#: Beginnings of keys of common services.
_KNOWN: Final = re.compile(
    r"(sk-|pk-|rk_|ghp_|gho_|ghs_|ghu_|github_pat_|glpat-|xox[abprs]-|AKIA|ASIA|AIza|eyJ|nk_|hf_|npm_|pypi-|ya29\.)"
    r"[A-Za-z0-9_\-./+=]{8,}"
)

_WORD: Final = re.compile(r"[A-Za-z0-9_\-+=]{20,}")
#: Shorter values of references are words that other texts contain too.
_LEAST_CHARS: Final = 6

_LEAST_ENTROPY_BITS: Final = 3.5

_SCHEMES: Final = re.compile(r"(?i)^(bearer|basic|token|digest)\s+")


def shown(declaration: Declaration) -> dict[str, Any]:
    """Return a declaration as listings show it: each literal that looks like a secret is masked."""
    found = literal_secrets(declaration)
    hide = Redactor(found.values())
    plain = declaration.model_dump(mode="json", exclude_defaults=True)
    for where, literal in found.items():  # also those that are too short for a redactor
        group, _, key = where.partition(".")
        if group in ("env", "headers"):
            plain[group][key] = plain[group][key].replace(literal, MASK)
    return {key: _hidden(value, hide) for key, value in plain.items()}


def redactor_of(declaration: Declaration) -> Redactor:
    """Return the redactor of texts about a server: it knows literal secrets and the values of references."""
    values = [value for text in declaration.texts() for value in referenced(text)]
    literals = literal_secrets(declaration).values()
    words = [word for literal in literals for word in _secret_words(literal)]
    return Redactor([*literals, *words, *(value for value in values if len(value) >= _LEAST_CHARS)])


def literal_secrets(declaration: Declaration) -> dict[str, str]:
    """Return the literal texts that look like secrets, by where they are, for example ``env.API_KEY``."""
    return dict(_found(declaration))


def _found(declaration: Declaration) -> Iterator[tuple[str, str]]:
    yield from _of_mapping("env", declaration.env)
    yield from _of_mapping("headers", declaration.headers)
    yield from _of_arguments(declaration.args)
    if declaration.url is not None:
        yield from _of_url(declaration.url)
    if declaration.nekro.oauth is not None:
        yield from _of_mapping("nekro.oauth", {"client_secret": declaration.nekro.oauth.client_secret})


def _of_mapping(where: str, values: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    for key, value in values.items():
        literal = _SCHEMES.sub("", without_references(value)).strip()
        if literal and (_SECRET_KEY.search(key) or _looks_secret(literal)):
            yield f"{where}.{key}", literal


def _of_arguments(args: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    for index, arg in enumerate(args):
        option, has_value, value = arg.partition("=")
        is_named = arg.startswith("-")
        literal = without_references(value if is_named and has_value else arg).strip()
        before = args[index - 1] if index else ""
        names_secret = (is_named and has_value and _SECRET_KEY.search(option)) or (
            before.startswith("-") and "=" not in before and not is_named and _SECRET_KEY.search(before)
        )
        if literal and (names_secret or _looks_secret(literal)):
            yield f"args[{index}]", literal


def _of_url(url: str) -> Iterator[tuple[str, str]]:
    try:
        parts = urlsplit(url)
        password = parts.password
    except ValueError:
        return
    if password and without_references(password):
        yield "url (password)", password
    for key, value in parse_qsl(parts.query, keep_blank_values=True):
        if value and without_references(value) and (_SECRET_KEY.search(key) or _looks_secret(value)):
            yield f"url ({key})", value
    for part in parts.path.split("/"):
        if _looks_secret(without_references(part)):
            yield "url (path)", part


def _looks_secret(text: str) -> bool:
    return bool(_secret_words(text))


def _secret_words(text: str) -> list[str]:
    """Return the parts of a text that look like keys; those of paths, versions and packages are words."""
    known = [match[0] for match in _KNOWN.finditer(text)]
    return [*known, *(word for word in _WORD.findall(text) if _is_random(word))]


def _is_random(word: str) -> bool:
    kinds = (any(c.isdigit() for c in word), any(c.islower() for c in word), any(c.isupper() for c in word))
    if sum(kinds) < 2 or not kinds[0]:
        return False
    counts = Counter(word)
    bits = -sum(count / len(word) * math.log2(count / len(word)) for count in counts.values())
    return bits >= _LEAST_ENTROPY_BITS


def _hidden(value: Any, hide: Redactor) -> Any:
    if isinstance(value, str):
        return hide(value)
    if isinstance(value, Mapping):
        return {key: _hidden(item, hide) for key, item in value.items()}
    if isinstance(value, list):
        return [_hidden(item, hide) for item in value]
    return value


def describe_server(server: McpServer) -> dict[str, Any]:
    """Return a server for ``--json`` and for the API.

    ``status`` is ``disabled``, ``failed`` (with ``error``), ``new`` (not listed with this declaration yet) or
    ``ok``.
    """
    declaration, about = server.declaration, server.about or {}
    return {
        "name": server.name,
        "plugin": server.plugin_key,
        "status": _status(server),
        "source": server.source.value,
        "is_in_both": server.is_in_both,
        "transport": None if declaration is None else "stdio" if declaration.is_stdio else "http",
        "declaration": {} if declaration is None else shown(declaration),
        "tools": [tool.name for tool in server.tools],
        "notes": list(about.get("notes") or ()) if server.is_current else [],
        "server": " ".join(str(about[key]) for key in ("name", "version") if about.get(key)),
        "protocol": str(about.get("protocol") or ""),
        "error": server.error,
        "listed_at": None if server.listed_at is None else server.listed_at.isoformat(),
    }


def unused_reason(server: McpServer) -> str | None:
    """Return why no worker uses a server, so that none can test it; None if one may."""
    if server.declaration is None:
        return server.error
    return None if server.is_enabled else "it is disabled; enable it, then test it"


def secret_warnings(name: str, declaration: Declaration) -> list[str]:
    """Return one line for each literal of a declaration that looks like a secret."""
    return [
        f"{where} of {name} looks like a secret and is stored as it is; write ${{NAME}} instead, and "
        "set NAME in the environment of the workers"
        for where in literal_secrets(declaration)
    ]


def _status(server: McpServer) -> str:
    if not server.is_enabled:
        return "disabled"
    if server.error is not None:
        return "failed"
    return "ok" if server.is_current and server.tools_text is not None else "new"
