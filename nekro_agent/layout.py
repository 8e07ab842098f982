"""Directory layout: directory names below the data root, and paths as sandboxed code sees them.

<data root>/
├── plugins/<plugin key>/        a plugin's own files
├── plugin_database/             the database for tables of plugins (``resolve_db_url``)
├── configs/<plugin key>.yaml    a plugin's configuration
├── uploads/<id>/                /app/uploads in the chat's sandboxes, read-only there
├── sandboxes/<container key>/   /app/shared in the sandbox
├── packages/                    packages that ``dynamic_import_pkg`` installed
├── locks/                       locks of processes that write uploads
└── staging/                     private copies for the duration of one call

The names of uploads and sandbox directories are random-looking ids that SQL maps to chats
(``upload_areas``, ``chats``), so that host paths reveal nothing to sandboxed code. Without a
database, and in directories of older versions, uploads are below the chat's encoded key.
"""

from __future__ import annotations

import hashlib
import re
from functools import lru_cache
from pathlib import Path
from typing import Final, NamedTuple

from nekro_agent.errors import InvalidValueError

__all__ = [
    "PASSABLE",
    "SANDBOX_ROOT",
    "SANDBOX_SHARED",
    "SANDBOX_UPLOADS",
    "UNDO_NAME",
    "Channel",
    "channel_of",
    "config_file",
    "configs_dir",
    "default_container_key",
    "encode_key",
    "files_dir",
    "locks_dir",
    "packages_dir",
    "plugin_database",
    "plugin_dir",
    "shared_dir",
    "shared_root",
    "staging_dir",
    "uploads_dir",
    "uploads_root",
]

SANDBOX_ROOT: Final = "/app"
SANDBOX_UPLOADS: Final = "/app/uploads"
SANDBOX_SHARED: Final = "/app/shared"
#: Directory in it with what programs have changed (``nekro.sandbox.undo``). Lists omit it.
UNDO_NAME: Final = ".nekro-undo"

#: Directories of the data root that sandboxed code must be able to traverse where it runs as a separate
#: host user without a mount namespace.
PASSABLE: Final = frozenset({"uploads", "sandboxes", "layers"})

#: Longest name of an encoded key; file systems allow 255 bytes.
_MAX_NAME_BYTES: Final = 200
_UNSAFE = re.compile(r"[^A-Za-z0-9_.-]")
_ADAPTER: Final = re.compile(r"[A-Za-z][A-Za-z0-9_]*")
_CHANNEL_TYPE: Final = re.compile(r"(group|private)(?:[_:-]|$)")


class Channel(NamedTuple):
    """What a chat key says about its channel; None where it says nothing."""

    adapter_key: str | None
    channel_id: str | None
    #: ``"group"`` or ``"private"``.
    channel_type: str | None


@lru_cache(maxsize=1024)
def channel_of(chat_key: str) -> Channel:
    """Return the channel that a chat key names: ``onebot_v11-group_123`` is ``group_123`` of ``onebot_v11``.

    The adapter is the text before the first ``-`` if it is an identifier; the channel id is the rest, or
    the whole key if there is no adapter. The type is the word that the channel id begins with.

    Source: Nekro Agent joins a chat key from adapter and channel id with ``-``.
    """
    adapter, dash, rest = chat_key.partition("-")
    if not dash or not rest or not _ADAPTER.fullmatch(adapter):
        adapter, rest = "", chat_key
    kind = _CHANNEL_TYPE.match(rest)
    return Channel(adapter or None, rest if adapter or kind else None, kind[1] if kind else None)


def encode_key(key: str) -> str:
    """Return a directory name for a chat or container key; different keys have different names.

    Letters, digits, ``_``, ``.`` and ``-`` are kept; other characters become ``%XX`` of their
    UTF-8 bytes; a name that would be too long ends in ``~`` and a SHA-256.

    Raises:
        InvalidValueError: the key is empty or contains a lone surrogate.
    """
    if not isinstance(key, str):
        raise InvalidValueError(f"a chat or container key must be text, not {type(key).__name__}: {key!r}")
    if not key:
        raise InvalidValueError("a chat or container key is empty; it names a directory, so it needs a text")
    if set(key) == {"."}:
        return "%2E" * len(key) if len(key) <= 64 else _digest_name("dots", key)
    try:
        name = _UNSAFE.sub(lambda match: "".join(f"%{byte:02X}" for byte in match[0].encode()), key)
    except UnicodeEncodeError as exc:
        raise InvalidValueError(f"key {key!r} contains a lone surrogate, which cannot be encoded") from exc
    return name if len(name) <= _MAX_NAME_BYTES else _digest_name(name[:64], key)


def _digest_name(prefix: str, key: str) -> str:
    return f"{prefix}~{hashlib.sha256(key.encode()).hexdigest()}"


def default_container_key(chat_key: str) -> str:
    """Return the container key of a chat without one of its own."""
    return f"sandbox_{encode_key(chat_key)}"


def plugin_dir(root: Path, plugin_key: str) -> Path:
    """Directory of a plugin's own files."""
    return plugins_root(root) / encode_key(plugin_key)


def plugins_root(root: Path) -> Path:
    """Directory of the files of all plugins, with one subdirectory each."""
    return root / "plugins"


def plugin_database(root: Path) -> Path:
    """SQLite file for tables that plugins bring; all plugins share it."""
    return root / "plugin_database" / "plugins.sqlite3"


def config_file(root: Path, plugin_key: str) -> Path:
    """YAML file of a plugin's configuration."""
    return configs_dir(root) / f"{encode_key(plugin_key)}.yaml"


def configs_dir(root: Path) -> Path:
    """Directory of the configurations of all plugins."""
    return root / "configs"


def uploads_dir(root: Path, chat_key: str) -> Path:
    """Host directory of ``/app/uploads`` where no database assigns one."""
    return uploads_root(root) / encode_key(chat_key)


def uploads_root(root: Path) -> Path:
    """Directory of the uploads of all chats, with one subdirectory each."""
    return root / "uploads"


def files_dir(root: Path) -> Path:
    """Directory of what a host has of files in a store: contents, states and locks."""
    return root / "files"


def locks_dir(root: Path) -> Path:
    """Directory of lock files of the processes of a data root."""
    return root / "locks"


def shared_dir(root: Path, container_key: str) -> Path:
    """Host directory of ``/app/shared``."""
    return shared_root(root) / encode_key(container_key)


def shared_root(root: Path) -> Path:
    """Directory of all directories that are ``/app/shared`` somewhere, with one subdirectory each."""
    return root / "sandboxes"


def packages_dir(root: Path) -> Path:
    """Directory of packages that plugins requested, shared by all workers of the data root."""
    return root / "packages"


def staging_dir(root: Path) -> Path:
    """Directory of private copies of sandbox files."""
    return root / "staging"
