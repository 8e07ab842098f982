"""The code blocks of the four specification documents, as plugin files."""

from __future__ import annotations

import ast
import os
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SPEC_DIR = Path(os.environ.get("NEKRO_TEST_SPEC_DIR") or ROOT.parent / "shared" / "spec")

#: Short names of the documents, by the number at the start of their file names.
DOCUMENTS = {"000": "j1", "001": "c1", "002": "c2", "003": "j3"}

#: Names that the documents' examples presuppose: a plugin, and names imported in another block.
PRELUDE = """
import asyncio, base64, datetime, hashlib, json, os, time, uuid
from pathlib import Path
from typing import Any, Dict, List, Literal, Optional
import aiofiles
from pydantic import BaseModel
from nekro_agent.api import core, message
from nekro_agent.api.plugin import NekroPlugin, SandboxMethodType
from nekro_agent.api.schemas import AgentCtx

plugin = NekroPlugin(
    name="spec {name}", module_name="{name}", description="", version="1", author="spec", url=""
)

async def search_internal_db(query):
    return None if query == "nothing" else f"found: {{query}}"

async def generate_image_service(topic):
    return f"https://images.example/{{topic}}"

"""


@dataclass(frozen=True)
class Block:
    """One code block that registers something."""

    document: str
    code: str

    def functions(self) -> list[str]:
        """Names of the functions that it registers."""
        return re.findall(r"@plugin\.mount_\w+\((?:.|\n)*?\n(?:async )?def (\w+)", self.code)


@lru_cache
def all_blocks() -> list[Block]:
    """Every block that registers a method or a hook, in the documents' order."""
    blocks = []
    for path in sorted(SPEC_DIR.glob("*.txt")):
        document = DOCUMENTS.get(path.name[:3])
        if document is not None:
            codes = [code for code in _codes(path.read_text("utf-8")) if "@plugin.mount_" in code]
            blocks += [Block(document, code) for code in codes]
    return blocks


def write_plugins(directory: Path) -> list[str]:
    """Write one plugin file per document and return the plugins' module names.

    A plugin has one init hook; a document's second one goes to a plugin ``<document>_more``.
    """
    sources: dict[str, str] = {}
    for block in all_blocks():
        name = block.document
        if "mount_init_method" in block.code and "mount_init_method" in sources.get(name, ""):
            name += "_more"
        sources[name] = sources.get(name, PRELUDE.format(name=name)) + block.code + "\n\n"
    for name, text in sources.items():
        (directory / f"{name}.py").write_text(text, "utf-8")
    return list(sources)


def _codes(text: str) -> Iterator[str]:
    lines = text.splitlines()
    for index, line in enumerate(lines):
        if line.strip() == "```python":
            closing = line.replace("python", "")
            # A fence inside a docstring is indented further and belongs to the code.
            end = next((n for n in range(index + 1, len(lines)) if lines[n] == closing), None)
            if end is not None:
                yield textwrap.dedent("\n".join(lines[index + 1 : end]))
        elif line == "python":
            yield _unfenced(lines[index + 1 :])


def _unfenced(lines: list[str]) -> str:
    """Return the longest run of lines that is Python, as the document's copy has lost its fences."""
    best = ""
    for count in range(1, len(lines) + 1):
        if lines[count - 1] == "python":
            break
        candidate = "\n".join(lines[:count])
        try:
            tree = ast.parse(candidate)
        except SyntaxError:
            continue
        # A heading of one word parses as a name.
        if tree.body and isinstance(last := tree.body[-1], ast.Expr) and isinstance(last.value, ast.Name):
            continue
        best = candidate
    return best
