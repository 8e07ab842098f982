"""Rules for the console's files: nothing parses markup, nothing comes from elsewhere, modules stay small."""

from __future__ import annotations

import re
from pathlib import Path

STATIC = Path(__file__).parents[2] / "nekro" / "gateway" / "console" / "static"
SCRIPTS = sorted(STATIC.rglob("*.js"))
#: What interprets a text as markup or as a program.
INTERPRETERS = re.compile(
    r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|createContextualFragment|DOMParser|setHTML"
    r"|srcdoc(?!\")|\beval\b|new Function|setTimeout\(\s*[\"'`]|import\(\s*(?![\"']\./)|\.cssText|javascript:"
)
_IMPORT = re.compile(r"""(?:from|import\()\s*["']([^"']+)["']""")
_URL = re.compile(r"(?:https?:)?//[\w.-]+\.\w+[^\s\"']*")
MOST_LINES = 350


def test_no_script_interprets_a_text() -> None:
    assert len(SCRIPTS) > 30
    found = [
        f"{path.relative_to(STATIC)}:{number}: {line.strip()}"
        for path in SCRIPTS
        for number, line in enumerate(path.read_text("utf-8").split("\n"), 1)
        if INTERPRETERS.search(line) and not line.lstrip().startswith(("*", "/*", "//"))
    ]
    assert found == []


def test_only_the_helper_creates_elements() -> None:
    makers = [path.name for path in SCRIPTS if "createElement" in path.read_text("utf-8")]
    assert makers == ["dom.js"]


def test_imports_are_files_of_the_console() -> None:
    missing = [
        f"{path.relative_to(STATIC)}: {name}"
        for path in SCRIPTS
        for name in _IMPORT.findall(path.read_text("utf-8"))
        if not name.startswith(".") or not (path.parent / name).is_file()
    ]
    assert missing == []


def test_no_file_names_another_host() -> None:
    allowed = ("http://www.w3.org/2000/svg",)
    found = [
        f"{path.relative_to(STATIC)}: {url}"
        for path in STATIC.rglob("*")
        if path.suffix in (".js", ".css", ".html", ".svg")
        for url in _URL.findall(path.read_text("utf-8"))
        if url not in allowed
    ]
    assert found == []


def test_the_document_has_no_inline_script_or_style() -> None:
    text = (STATIC / "index.html").read_text("utf-8")
    assert re.findall(r"<script(?![^>]*\bsrc=)|\sstyle=|<style|\son\w+=", text) == []
    for name in re.findall(r'(?:src|href)="/console/([^"]+)"', text):
        assert (STATIC / name).is_file(), name


def test_modules_are_small() -> None:
    lengths = {str(path.relative_to(STATIC)): path.read_text("utf-8").count("\n") for path in SCRIPTS}
    assert {name: count for name, count in lengths.items() if count > MOST_LINES} == {}
