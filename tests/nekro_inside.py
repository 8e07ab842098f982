"""`nekro` in the test's own process, which saves the imports."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Mapping
from pathlib import Path

from loguru import logger

from nekro.cli.main import main


def run_inside(*arguments: str, directory: Path, environment: Mapping[str, str]) -> tuple[int, str, str]:
    """Run a command in a directory, with these variables only; returns exit code, stdout and stderr."""
    out, err, before = io.StringIO(), io.StringIO(), dict(os.environ)
    try:
        os.environ.clear()
        os.environ.update(environment)
        with contextlib.chdir(directory), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main(arguments)
    finally:
        os.environ.clear()
        os.environ.update(before)
        logger.remove()
    return code, out.getvalue(), err.getvalue()
