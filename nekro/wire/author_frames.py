"""Where in a plugin's own source an exception was raised: kept with the error, sent to its caller.

A frame has the file below the plugin's folder, so it names no path of the host. Frames of this project, of
the standard library and of installed packages are left out.
"""

from __future__ import annotations

import contextlib
import linecache
import sys
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import nekro_agent

__all__ = ["AuthorFrame", "attach", "attached", "author_frames", "frames_from", "source_folder"]

#: Most frames that are kept: the innermost ones.
MAX_FRAMES: Final = 20
#: Longer source lines, file names and names of functions are cut.
MAX_CHARS: Final = 200
_ATTRIBUTE: Final = "author_frames"
_PROJECT: Final = Path(nekro_agent.__file__).resolve().parents[1]


@dataclass(frozen=True, kw_only=True)
class AuthorFrame:
    """One place in a plugin's source."""

    #: Path below the folder that holds the plugin.
    file: str
    #: Counted from 1.
    line: int
    function: str
    #: The line's text without indentation; "" if it cannot be read.
    code: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}" + (f": {self.code}" if self.code else "")

    def as_record(self) -> dict[str, Any]:
        """Return the frame as JSON data; ``frames_from`` reads it."""
        return asdict(self)


def source_folder(module_name: str) -> Path | None:
    """Return the folder that holds the source of a plugin's module; None if the module has no file.

    A plugin that is one file has the folder of that file, a package the folder that contains the package.
    """
    parts = module_name.split(".")
    for length in range(1, len(parts) + 1):
        module = sys.modules.get(".".join(parts[:length]))
        folders = list(getattr(module, "__path__", None) or ())
        file = getattr(module, "__file__", None)
        if folders:
            folder = Path(folders[0]).resolve()
            return folder if file is None else folder.parent  # the loader's package of a file has no code
        if file:
            return Path(file).resolve().parent
    return None


def author_frames(
    error: BaseException, folder: Path, *, own: tuple[str, ...], hide: Callable[[str], str]
) -> tuple[AuthorFrame, ...]:
    """Return the frames of an exception's traceback that lie in a plugin's folder, the innermost last.

    Args:
        folder: from ``source_folder``.
        own: names of this project's packages, whose frames are left out wherever they lie.
        hide: removes secrets from a source line.
    """
    found: deque[AuthorFrame] = deque(maxlen=MAX_FRAMES)
    ours = tuple(f"{_PROJECT / name}/" for name in own)
    traceback = error.__traceback__
    while traceback is not None:
        code = traceback.tb_frame.f_code
        path = Path(code.co_filename)
        is_own = path.is_relative_to(folder) and not code.co_filename.startswith(ours)
        if is_own and "site-packages" not in path.relative_to(folder).parts:
            source = linecache.getline(code.co_filename, traceback.tb_lineno, traceback.tb_frame.f_globals)
            found.append(
                AuthorFrame(
                    file=str(path.relative_to(folder))[-MAX_CHARS:],
                    line=traceback.tb_lineno,
                    function=code.co_qualname[:MAX_CHARS],
                    code=hide(source.strip())[:MAX_CHARS],
                )
            )
        traceback = traceback.tb_next
    return tuple(found)


def attach(error: BaseException, frames: tuple[AuthorFrame, ...]) -> None:
    """Keep frames with an exception."""
    with contextlib.suppress(Exception):  # a plugin's class may refuse attributes
        setattr(error, _ATTRIBUTE, frames)


def attached(error: BaseException) -> tuple[AuthorFrame, ...]:
    """Return the frames that ``attach`` kept; () if there are none."""
    frames = getattr(error, _ATTRIBUTE, ())
    return frames if isinstance(frames, tuple) else ()


def frames_from(value: object) -> tuple[AuthorFrame, ...]:
    """Read frames that came over the wire; whatever is not a list of frames gives ()."""
    if not isinstance(value, list):
        return ()
    return tuple(frame for item in value[-MAX_FRAMES:] if (frame := _frame(item)) is not None)


def _frame(value: object) -> AuthorFrame | None:
    if not isinstance(value, Mapping):
        return None
    texts = {name: value.get(name) for name in ("file", "function", "code")}
    line = value.get("line")
    if not all(isinstance(text, str) for text in texts.values()) or type(line) is not int:
        return None
    return AuthorFrame(line=line, **{name: str(text)[:MAX_CHARS] for name, text in texts.items()})
