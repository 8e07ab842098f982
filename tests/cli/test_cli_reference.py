"""The reference pages equal the generated ones."""

from __future__ import annotations

import functools
import os
from pathlib import Path

import pytest
from forked_process import run_forked

from nekro.cli import reference
from nekro.cli.commands.doctor import list_settings
from nekro.cli.main import COMMANDS
from nekro.cli.running import ExitCode

ROOT = Path(__file__).parents[2]
NAMES = ("../openapi.json", "cli.md", "settings.md")


@functools.cache
def pages() -> dict[str, str]:
    """The generated pages. Not at the import, which every process of a test run pays for."""
    return reference.pages()


@pytest.mark.extended
def test_every_page_is_compared() -> None:
    assert set(pages()) == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_page_is_up_to_date(name: str) -> None:
    path = ROOT / "docs" / "reference" / name
    assert path.read_text("utf-8") == pages()[name], "run `make docs`"


@pytest.mark.extended
def test_pages_do_not_depend_on_the_terminal() -> None:
    done = run_forked("nekro.cli.reference", "--check", environ={**os.environ, "COLUMNS": "40"}, cwd=ROOT)
    assert (done.returncode, done.stderr) == (0, "")


def test_every_command_and_exit_code_is_documented() -> None:
    page = pages()["cli.md"]
    for command in COMMANDS:
        assert f"## nekro {command.name}" in page
    for code in ExitCode:
        assert f"| {code.value} | {code.name} | {code.meaning} |" in page


def test_every_setting_is_documented_with_its_default() -> None:
    from broker_config.settings import Settings

    page = pages()["settings.md"]
    for setting in list_settings(Settings.model_construct()):
        assert f"`{setting['variable']}`" in page
        assert setting["description"], f"{setting['variable']} has no description"
        assert not setting["changed"]
