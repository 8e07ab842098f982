"""The console escapes invisible characters, as the terminal does, and keeps emoji."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

MODULE = Path(__file__).parents[2] / "nekro" / "gateway" / "console" / "static" / "lib" / "visible.js"
SCRIPT = """
const { visible, visibleJson } = await import(process.argv[1]);
const texts = JSON.parse(process.argv[2]);
console.log(JSON.stringify(texts.map((text) => [visible(text), visibleJson(JSON.stringify(text))])));
"""
HIDDEN = (
    0x00, 0x1B, 0x7F, 0x85, 0xAD, 0x034F, 0x061C, 0x115F, 0x17B4, 0x180E, 0x200B, 0x202E, 0x2028, 0x2060,
    0x2800, 0x3164, 0xE000, 0xFEFF, 0xFFA0, 0xFFF0, 0x1D159, 0xE0041, 0xE0101, 0x10FFFF,
)  # fmt: skip
SEEN = ("❤️‍🔥 👨‍👩‍👧 1️⃣", "می‌خواهم", "a\n\tb", "你好\u3000é")


def run(*texts: str) -> list[tuple[str, str]]:
    node = shutil.which("node")
    if node is None:
        pytest.skip("no Node.js: apt-get install nodejs")
    command = [node, "--input-type=module", "-e", SCRIPT, MODULE.as_uri(), json.dumps(texts)]
    return [
        (one, two) for one, two in json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    ]


def test_texts_are_shown_without_invisible_characters_and_emoji_as_they_are() -> None:
    texts = [f"猫{chr(code)}b" for code in HIDDEN]
    for text, (shown, written) in zip(texts, run(*texts), strict=True):
        assert text[1] not in shown and "\\" in shown
        assert text[1] not in written and json.loads(written) == text
    assert [shown for shown, _ in run(*SEEN)] == list(SEEN)


def test_joiners_in_arguments_are_escaped_and_alone_they_hide_nothing() -> None:
    text = "ad\u200dmin\ufe0f\ufe0f"
    ((shown, written),) = run(text)
    assert shown == "ad\\u200dmin\\ufe0f\\ufe0f"
    assert written.isascii() and json.loads(written) == text
