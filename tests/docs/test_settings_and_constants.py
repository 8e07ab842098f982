"""The page of settings and time constants has a row for each, names none that is missing, and counts them."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest
from time_constants import TimeConstant, time_constants

from broker_config.setting_sources import FIXED_SETTINGS, REMOVED_SETTINGS
from broker_config.settings import ENV_PREFIX, known_variables

LAB = Path(__file__).parents[2] / "docs" / "lab"
PAGE = LAB / "settings-and-constants.md"
REDESIGN = LAB / "redesign.md"
SETTINGS = [variable.removeprefix(ENV_PREFIX) for variable, _, _ in known_variables()]
#: What came after the redesign, whose aims do not count it.
LATER_GROUPS = {"APPROVAL", "BUDGETS", "GATEWAY", "MCP", "MODELS"}
LATER_MODEL_VALUES = {
    "LLM__CACHED_INPUT_PRICE_PER_MILLION",
    "LLM__CONTEXT_TOKENS",
    "LLM__FALLBACKS",
    "LLM__PARAMETERS",
    "LLM__PROTOCOL",
    "LLM__PROXY",
    "LLM__VISION",
}
LATER_PACKAGES = ("nekro.extensions.", "nekro.gateway.", "nekro_client.")
#: Parts of extensions that run in workers, and are counted with them.
OF_WORKERS = tuple(
    f"nekro.extensions.{module}."
    for module in (
        "mcp.questions", "mcp.server_requests", "mcp.follower",
        "plugin_pages.site", "plugin_pages.hosts",
    )
)  # fmt: skip


@functools.cache
def constants() -> dict[str, TimeConstant]:
    """Each time constant by its name; all modules are parsed for them."""
    return {constant.name: constant for constant in time_constants()}


def rows(title: str) -> list[list[str]]:
    """Cells of the rows below a heading, without the head of the table; the first is a name in backticks."""
    _, _, rest = PAGE.read_text("utf-8").partition(f"\n## {title}\n")
    lines = rest.partition("\n## ")[0].splitlines()
    found = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| `")
    ]
    assert found, title
    return [[cells[0].strip("`"), *cells[1:]] for cells in found]


def test_every_setting_has_one_row_with_its_reason() -> None:
    listed = rows("Settings")
    assert all(len(cells) == 3 and cells[2] for cells in listed)
    kept = [name for name, decision, _ in listed if decision != "removed"]
    assert {decision for _, decision, _ in listed} <= {"kept", "added", "new", "removed"}
    assert kept == SETTINGS, "one row per setting, in the order of broker_config/settings.py"


def test_every_removed_setting_is_one_that_start_up_names() -> None:
    removed = [name for name, decision, _ in rows("Settings") if decision == "removed"]
    assert sorted(removed) == sorted(
        name.removeprefix(ENV_PREFIX) for name in REMOVED_SETTINGS | FIXED_SETTINGS
    )


def test_every_time_constant_has_one_row_with_its_value_and_reason() -> None:
    listed = rows("Time constants that are left")
    assert all(len(cells) == 3 and cells[2] for cells in listed)
    assert sorted(name for name, _, _ in listed) == sorted(constants())
    wrong = [
        (name, value, constants()[name].value)
        for name, value, _ in listed
        if normal(re.sub(r" (s|days)$", "", value)) != constants()[name].value
    ]
    assert wrong == []


def test_no_time_constant_that_went_is_still_there() -> None:
    assert {name for name, *_ in rows("Time constants that went")} & constants().keys() == set()


def normal(expression: str) -> str:
    return ast.unparse(ast.parse(expression, mode="eval"))


def is_later(kind: str, name: str) -> bool:
    if kind == "settings":
        return name.split("__")[0] in LATER_GROUPS or name in LATER_MODEL_VALUES
    return name.startswith(LATER_PACKAGES) and not name.startswith(OF_WORKERS)


@pytest.mark.parametrize("kind", ["settings", "time constants"])
def test_the_counts_on_the_pages_are_those_of_the_code(kind: str) -> None:
    names = SETTINGS if kind == "settings" else list(constants())
    all_of_them, later = len(names), sum(is_later(kind, name) for name in names)
    row = f"| {kind} | {all_of_them} | {later} | {all_of_them - later} |"
    assert row in PAGE.read_text("utf-8").splitlines()
    assert f"{all_of_them} {kind}, {later} of them in packages that came later" in REDESIGN.read_text("utf-8")


def test_what_came_later_exists() -> None:
    assert set(SETTINGS) >= LATER_MODEL_VALUES
    assert {name.split("__")[0] for name in SETTINGS} >= LATER_GROUPS
