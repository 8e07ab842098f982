"""What is installed: the version, which only ``pyproject.toml`` states, and the names of the extensions."""

from __future__ import annotations

import importlib
import pkgutil
from typing import Final

__all__ = ["EXTENSIONS", "extension_names", "release"]

#: The package of extensions.
EXTENSIONS: Final = "nekro.extensions"


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
