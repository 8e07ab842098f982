"""Runs the model's code in a process of its own, whose calls come back over its pipes; without a sandbox.

This is what people write who have no sandbox: nothing limits the code, which has all rights of the user.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

__all__ = ["block_of", "run_code"]

_BLOCK = re.compile(r"```python\n(.*?)```", re.DOTALL)
#: Reads its code, answers calls by asking, and says at the end what was printed.
_CHILD = """\
import contextlib, io, json, sys

def ask(message):
    answers.write(json.dumps(message) + "\\n")
    answers.flush()
    return json.loads(sys.stdin.readline())

answers, begin, printed = sys.stdout, json.loads(sys.stdin.readline()), io.StringIO()
names = {
    name: (lambda *args, name=name: ask({"call": name, "args": args})["value"]) for name in begin["names"]
}
with contextlib.redirect_stdout(printed):
    exec(begin["code"], names)
answers.write(json.dumps({"printed": printed.getvalue()}) + "\\n")
"""


def block_of(text: str) -> str | None:
    """Return the code of a model's answer; None if it has none."""
    found = _BLOCK.search(text)
    return found[1] if found else None


async def run_code(code: str, tools: Mapping[str, Callable[..., Awaitable[Any]]]) -> str:
    """Run code with functions for the tools; returns what it printed.

    Raises:
        RuntimeError: it failed.
    """
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-I", "-c", _CHILD, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(json.dumps({"code": code, "names": list(tools)}).encode() + b"\n")
    printed: str | None = None
    while line := await process.stdout.readline():
        message = json.loads(line)
        if "printed" in message:
            printed = message["printed"]
            continue
        value = await tools[message["call"]](*message["args"])
        process.stdin.write(json.dumps({"value": value}).encode() + b"\n")
    process.stdin.close()
    if await process.wait() or printed is None:
        raise RuntimeError(f"the code ended with {process.returncode}")
    return printed
