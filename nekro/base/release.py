"""What is installed: the version, which only ``pyproject.toml`` states, and the names of the extensions."""

from __future__ import annotations

import importlib
import pkgutil
from typing import Any, Final

__all__ = ["EXTENSIONS", "extension", "extension_names", "imported", "release"]

#: The package of extensions.
EXTENSIONS: Final = "nekro.extensions"
#: Name under which the package of an extension describes it.
_ATTRIBUTE: Final = "EXTENSION"


def release() -> str:
    """Return the installed version; "(source tree)" when the distribution is not installed."""
    from importlib import metadata  # a quarter of the time of `nekro --help`

    try:
        return metadata.version("nekro-workers")
    except metadata.PackageNotFoundError:
        return "(source tree)"


def extension_names() -> list[str]:
    """Return the names of the installed extensions, sorted; imports none of them."""
    folders = importlib.import_module(EXTENSIONS).__path__
    return sorted(module.name for module in pkgutil.iter_modules(folders))


def imported(part: str) -> Any:
    """Return what ``module:NAME`` names; imports the module."""
    module, _, name = part.partition(":")
    return getattr(importlib.import_module(module), name)


def extension(name: str) -> Any:
    """Return the ``nekro.app.extensions.Extension`` of an installed extension; imports its package only."""
    return imported(f"{EXTENSIONS}.{name}:{_ATTRIBUTE}")
