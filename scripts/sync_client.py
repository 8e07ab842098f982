#!/usr/bin/env python3
"""Write the synchronous modules of nekro_client from the asynchronous ones.

    scripts/sync_client.py [--check]

Only the asynchronous modules are edited by hand. With ``--check`` nothing is written; the exit code is 1 when
a module is not what this script would write.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parent.parent / "nekro_client"
SOURCE = "async_"
#: What becomes of words, in this order.
WORDS = (
    (r"\basync (def|with|for) ", r"\1 "),
    (r"\bawait ", ""),
    (r"\bAsyncGenerator\[(\w+), None\]", r"Generator[\1, None, None]"),
    (r"\bAbstractAsync(?=[A-Z])", "Abstract"),
    (r"\bAsync(?=[A-Z])", ""),
    (r"\bAsynchronous\b", "Blocking"),
    (r"\b(__a|a)(?=(next|enter|exit|read|iter_bytes|iter_raw|close|chunks)(__)?\()", lambda m: m[1][:-1]),
    (rf"\b{SOURCE}(?=(chats|client|connections)\b)", ""),
    (r"\basyncio\.shield\(asyncio\.to_thread\((\w+), (\*\w+)\)\)", r"\1(\2)"),
    (r"\basyncio\b", "time"),
    (r"\blimited\b", "limited_blocking"),
    (" for one event loop, usable", "; thread-safe, usable"),
    ("``__anext__``", "``__next__``"),
)


def translated(source: Path) -> str:
    """Return the synchronous form of a module."""
    text = source.read_text("utf-8")
    for old, new in WORDS:
        text = re.sub(old, new, text)
    text = f"# Generated from {source.name} by scripts/sync_client.py.\n{text}"
    target = f"nekro_client/{source.name.removeprefix(SOURCE)}"
    for command in (("check", "--quiet", "--fix", "--select", "I"), ("format", "--quiet")):
        ruff = [sys.executable, "-m", "ruff", *command, "--stdin-filename", target, "-"]
        text = subprocess.run(  # noqa: S603
            ruff, input=text, cwd=FOLDER.parent, stdout=subprocess.PIPE, text=True, check=True
        ).stdout
    return text


def main() -> int:
    """Write the modules, or compare them."""
    stale = 0
    for source in sorted(FOLDER.glob(f"{SOURCE}*.py")):
        target = source.with_name(source.name.removeprefix(SOURCE))
        text = translated(source)
        if target.exists() and target.read_text("utf-8") == text:
            continue
        if "--check" in sys.argv[1:]:
            print(f"nekro_client/{target.name} is stale; run scripts/sync_client.py")
            stale = 1
        else:
            target.write_text(text, "utf-8")
    return stale


if __name__ == "__main__":
    sys.exit(main())
