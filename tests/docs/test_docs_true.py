"""Commands, make targets, settings, files and tests on the pages exist."""

from __future__ import annotations

import contextlib
import io
import re
import shlex
from pathlib import Path

import pytest
from test_layers import ORDER

from broker_config.model_groups import group_variables
from broker_config.settings import CLIENT_VARIABLES
from nekro.cli.environment import known_variables
from nekro.cli.main import WrongUsage, build_parser

ROOT = Path(__file__).parents[2]
#: Translations contain the README's blocks (``test_readme.py``).
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
TESTS = list((ROOT / "tests").rglob("test_*.py"))
SPAN = re.compile(r"`([^`\n]+)`")
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
#: Languages of blocks that contain commands.
TYPED = ("", "bash", "sh", "text")
TEST = re.compile(r"(?:tests/[\w/]+/)?test_\w+\.py(?:::(test_\w+))?(…)?")
VARIABLE = re.compile(r"\bNEKRO_[A-Z_]+[A-Z]\b")


def code_texts(page: Path) -> list[str]:
    """Code spans and block lines of a page."""
    text = page.read_text("utf-8")
    lines = [
        line for language, block in BLOCK.findall(text) if language in TYPED for line in block.splitlines()
    ]
    return [*SPAN.findall(BLOCK.sub("", text)), *lines]


def commands(page: Path) -> list[list[str]]:
    """Command lines of `nekro` on a page, without shell syntax."""
    found = []
    for words in code_texts(page):
        line = re.sub(r"^\S*/nekro ", "nekro ", words.strip())
        if line.startswith("nekro ") and "…" not in line:
            found.append(shlex.split(re.split(r"\s[|>&]|\s#", line)[0])[1:])
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_each_command_on_a_page_is_valid(page: Path) -> None:
    wrong, parser = [], build_parser()
    for arguments in commands(page):
        try:
            # `--help` and `--version` print and exit.
            with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
                parser.parse_args(arguments)
        except WrongUsage as exc:
            # A command that is only mentioned lacks its arguments; any other error counts.
            if not (len(arguments) == 1 and "required" in str(exc)):
                wrong.append(f"nekro {shlex.join(arguments)}: {exc}")
    assert wrong == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_each_make_target_on_a_page_exists(page: Path) -> None:
    chores = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    asked = {match[1] for words in code_texts(page) if (match := re.match(r"make ([a-z-]+)", words.strip()))}
    assert asked <= chores


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_each_setting_on_a_page_exists(page: Path) -> None:
    known = {variable for variable, _, _ in known_variables()} | {"NEKRO_DATA_DIR", *CLIENT_VARIABLES}
    known |= {f"{name}_FILE" for name in known}
    named = {
        name
        for words in code_texts(page)
        for name in VARIABLE.findall(words)
        if not name.startswith("NEKRO_TEST_") and f"{name}__…" not in words and f"{name}_…" not in words
    }
    assert sorted(named - set(known) - group_variables(named)) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_each_test_on_a_page_exists(page: Path) -> None:
    files = {path.name: path for path in TESTS}
    gone = []
    for words in SPAN.findall(page.read_text("utf-8")):
        for match in TEST.finditer(words):
            path = files.get(match[0].partition("::")[0].rpartition("/")[2])
            if path is None or (match[1] and f"def {match[1]}" not in path.read_text("utf-8")):
                gone.append(match[0])
    assert gone == []


def test_each_file_that_contributing_names_is_there() -> None:
    spans = SPAN.findall((ROOT / "CONTRIBUTING.md").read_text("utf-8"))
    files = [span for span in spans if re.fullmatch(r"[\w./-]+/[\w.-]*", span) and "NAME" not in span]
    assert len(files) > 50
    assert [name for name in files if not (ROOT / name).exists()] == []


def test_the_glossary_has_each_term_once_in_alphabetical_order() -> None:
    page = (ROOT / "docs" / "glossary.md").read_text("utf-8")
    rows = [
        re.findall(r"\*\*(.+?)\*\*", line.split("|")[1])
        for line in page.split("\n")
        if line.startswith("| **")
    ]
    first = [terms[0].lower() for terms in rows]
    assert first == sorted(first)
    terms = [term for row in rows for term in row]
    assert len(terms) == len(set(terms))


def test_the_pages_list_the_packages_in_the_order_of_their_imports() -> None:
    contributing = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    line = next(line for line in contributing.split("\n") if "Imports go one way" in line)
    chain = line.split("Imports go one way:")[1].split(";")[0]
    assert tuple(SPAN.findall(chain)) == ORDER
    page = (ROOT / "docs" / "architecture.md").read_text("utf-8").split("## Package layout")[1]
    assert tuple(re.findall(r"^\| `([\w/]+)/` \|", page, re.MULTILINE)) == (*ORDER, "plugin_pkgs")
