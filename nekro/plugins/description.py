"""Describes imported plugins as the catalogue's entries.

``python -m nekro.plugins.description``, for processes that import no plugin themselves, imports those
that the settings of its environment name, as a worker would, without their init hooks, and writes one JSON
document to stdout: ``{"plugins", "warnings"}``.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Final

from nekro.plugins.entries import PluginEntry
from nekro.plugins.loader import LoadedPlugins, PluginRecord
from nekro.plugins.registry import LoadedRegistry

__all__ = ["entries_of", "files_digest", "source_digest"]

#: Folders that are not part of a plugin's version.
_NO_SOURCE: Final = ("__pycache__", ".git")


def entries_of(
    loaded: LoadedPlugins, registry: LoadedRegistry, *, digest: Callable[[PluginRecord], str]
) -> list[PluginEntry]:
    """Return an entry for each plugin and each failure, in loading order.

    Args:
        digest: returns the digest of a plugin's files.
    """
    entries = {entry.key: entry for entry in registry.plugins}
    return [_entry(record, entries, digest(record)) for record in loaded.records]


def source_digest(record: PluginRecord) -> str:
    """Return the digest of the files that a plugin was loaded from, as they are now."""
    return files_digest(_root_of(record))


def files_digest(root: Path | None) -> str:
    """Return the SHA-256 of a file, or of the Python files below a folder; "" when there is neither."""
    if root is None or not root.exists():
        return ""
    digest = hashlib.sha256()
    for path in _sources(root):
        try:
            content = path.read_bytes()
        except OSError:
            continue  # removed meanwhile, or not readable: then it was not loaded either
        name = path.relative_to(root).as_posix() if path != root else path.name
        digest.update(f"{name}\0{len(content)}\0".encode("utf-8", "surrogateescape") + content)
    return digest.hexdigest()


def _entry(record: PluginRecord, entries: dict[str, PluginEntry], digest: str) -> PluginEntry:
    plugin = record.plugin
    entry = entries[plugin.key] if plugin is not None else PluginEntry(key=record.key)
    return replace(
        entry,
        status=record.status,
        error=record.error,
        path=record.path,
        digest=digest,
        enabled=plugin is None or plugin.is_enabled,
        pinned=plugin is not None and plugin.pinned,
        placeholders=tuple(record.placeholders),
    )


def _sources(root: Path) -> Iterator[Path]:
    if root.is_file():
        yield root
        return
    for path in sorted(root.rglob("*.py")):
        if not any(part in _NO_SOURCE for part in path.relative_to(root).parts):
            yield path


def _root_of(record: PluginRecord) -> Path | None:
    path = Path(record.path)
    if path.exists():
        return path
    file = getattr(sys.modules.get(record.module), "__file__", None)
    if file is None:
        return None
    return Path(file).parent if Path(file).name == "__init__.py" else Path(file)


def _describe() -> dict[str, object]:
    from broker_config.settings import Settings
    from nekro.plugins.configuration import core_config, package_policy, plugin_dirs
    from nekro.plugins.loader import load_plugins

    settings = Settings.load()
    loaded = load_plugins(
        settings.plugins.dirs,
        disabled=settings.plugins.disabled,
        shipped=settings.plugins.load_shipped,
        data_dir=settings.data_dir,
        packages=package_policy(settings),
        core=core_config(settings),
    )
    registry = LoadedRegistry(
        loaded.plugins,
        long_methods=settings.workers.long_methods,
        approval=settings.approval,
        dirs=plugin_dirs(settings.files),
    )
    return {
        "plugins": [entry.to_json() for entry in entries_of(loaded, registry, digest=source_digest)],
        "warnings": loaded.warnings,
    }


def _main() -> None:
    # What plugins print must not mix with the document.
    answer = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    with answer:
        json.dump(_describe(), answer)
        answer.flush()
        # Threads that a plugin started at import must not keep this process.
        os._exit(0)


if __name__ == "__main__":
    _main()
