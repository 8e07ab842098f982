"""Names that the API, the command line and the console share are the same everywhere."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

from nekro.operations.actor import Scope
from nekro_client.models import CostGroup, KeyScope
from storage.listings import series

PAGES = Path(__file__).parents[2] / "nekro" / "gateway" / "console" / "static" / "pages"


def shown(page: str, name: str) -> list[str]:
    """The first texts of the pairs in a constant of a page of the console."""
    constant = re.search(
        rf"^const {name} = \[(.*?)\];$", (PAGES / page).read_text(), re.DOTALL | re.MULTILINE
    )
    assert constant is not None
    return re.findall(r'\["(\w+)", "', constant[1])


def test_scopes_of_keys() -> None:
    assert list(get_args(KeyScope)) == [scope.value for scope in Scope]
    assert shown("keys.js", "SCOPES") == [scope.value for scope in Scope]


def test_groups_of_costs() -> None:
    assert list(series._COLUMNS) == list(get_args(CostGroup))
    assert sorted(shown("costs.js", "KINDS")) == sorted(get_args(CostGroup))
