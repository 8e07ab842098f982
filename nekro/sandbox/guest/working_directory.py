"""The working directory of the code: the chat's shared files, and imports of modules among them.

The runner itself starts elsewhere and enters the directory when the code arrives, so that nothing that was
loaded before it, preloaded packages included, reads the chat's files.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from nekro.sandbox.guest.listings import hide

if TYPE_CHECKING:
    from typing import Any

__all__ = ["OwnModules", "WorkingDirectory"]

#: Names of the two areas where the runner starts, and what links of these names in the shared files lead to.
LINKS = {"shared": ".", "uploads": "../uploads"}


class WorkingDirectory:
    """Enters the shared files, where ``shared/x`` and ``uploads/x`` stay valid names.

    Links make them valid. Programs that list, count, search or clear their files must not meet these. So a
    link exists only while a program runs whose text mentions the area other than by ``/app/…``, and lists of
    that program omit it (``listings``); the host removes it (``nekro.sandbox.shared``).
    ``nekro_agent.tools.path_convertor`` reads such names in the same way.
    """

    def __init__(self) -> None:
        #: Where the code runs.
        self.path = os.getcwd()

    def enter(self, text: str) -> None:
        """Make the shared files the working directory; stay where they cannot be entered.

        Args:
            text: the code and its variables.
        """
        areas = {name: os.path.realpath(name) for name in LINKS}
        try:
            os.chdir(areas["shared"])
        except OSError:
            return
        self.path = areas["shared"]
        for name in LINKS:
            if name in text.replace(f"/app/{name}", ""):
                # Relative, so that the one to the uploads leads nowhere for the host.
                self._link(name, os.path.relpath(areas[name], self.path))

    def _link(self, name: str, target: str) -> None:
        """Make a link, or replace another link of its name; a file or directory of that name stays."""
        try:
            if os.path.islink(name) and os.readlink(name) != target:
                os.unlink(name)
            if not os.path.lexists(name):
                os.symlink(target, name)
        except OSError:  # the disk is full: names that begin with the area are missing, others work
            return
        if os.path.islink(name):
            hide(name, target)


class OwnModules:
    """The last finder: modules in the working directory, for imports that the code itself states.

    Packages try many imports that may fail. They never get a file of the chat, which might be named like
    one of these by accident; nor do the runner's own imports.
    """

    def __init__(self, directory: str, names: dict[str, Any]) -> None:
        """
        Args:
            names: the globals of the code.
        """
        self._directory = directory
        self._names = names

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Find a module of the working directory; None where the code did not ask for it."""
        if path is not None or not self._is_asked_by_code():
            return None
        # The cached list of the directory may be older than a file that was just written.
        sys.path_importer_cache.pop(self._directory, None)
        for finder in sys.meta_path:
            if getattr(finder, "__name__", "") == "PathFinder":
                return finder.find_spec(name, [self._directory])
        return None

    def _is_asked_by_code(self) -> bool:
        frame = sys._getframe(2)
        while frame is not None and is_of_importlib(frame.f_globals):
            frame = frame.f_back  # type: ignore[assignment]
        if frame is None:
            return False
        names = frame.f_globals
        return names is self._names or str(names.get("__file__", "")).startswith(f"{self._directory}/")


def is_of_importlib(names: dict[str, Any]) -> bool:
    """Whether globals are those of a module of the import system."""
    return str(names.get("__name__", "")).partition(".")[0] in ("importlib", "_frozen_importlib")
