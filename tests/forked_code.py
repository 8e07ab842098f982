"""Processes that run Python code as ``python -c`` does, but forked."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from forked_process import ForkedCommand

__all__ = ["forked"]


def forked(code: str, *arguments: str, has_stdin: bool = False) -> ForkedCommand:
    """Start a process with pipes; closing its standard input with `communicate` may be its sign to begin."""
    from forked_process import ForkedCommand

    return ForkedCommand("forked_code", [code, *arguments], environ=os.environ, has_stdin=has_stdin)


if __name__ == "__main__":
    text, sys.argv = sys.argv[1], ["-c", *sys.argv[2:]]
    exec(compile(text, "<string>", "exec"), {"__name__": "__main__"})
