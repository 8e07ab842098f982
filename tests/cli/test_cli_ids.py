"""Ids that a command gets by their beginning."""

from __future__ import annotations

import pytest
from pydantic import BaseModel

from nekro.cli.api import find
from nekro.cli.command import chosen_id
from nekro_agent.errors import NotFoundError, UsageError
from nekro_client.models import Page


def chosen(beginning: str) -> str:
    return chosen_id(["ab", "abc", "abd", "x1"], beginning, noun="timer", listing="nekro timers")


@pytest.mark.parametrize(("beginning", "found"), [("x", "x1"), ("abc", "abc"), ("ab", "ab")])
def test_an_id_is_found_by_its_beginning_and_a_whole_id_before_longer_ones(
    beginning: str, found: str
) -> None:
    assert chosen(beginning) == found


def test_no_id_and_several_ids_are_different_errors() -> None:
    with pytest.raises(NotFoundError, match="no timer has the id y; `nekro timers` lists them"):
        chosen("y")
    with pytest.raises(UsageError, match="several ids begin with a; write more"):
        chosen("a")


class Listed(BaseModel):
    """An item of a list."""

    id: str
    number: int | None = None


async def found(name: str, *items: Listed, ids_per_page: int = 1) -> str:
    """Find an id in a list that answers in pages, as the API does."""

    async def page(*, beginning: str, cursor: str | None, limit: int) -> Page[Listed]:
        start = int(cursor or 0)
        shown = [
            item
            for item in items[start : start + ids_per_page]
            if item.id.startswith(beginning) or str(item.number) == beginning.removeprefix("#")
        ]
        more = start + ids_per_page
        return Page(items=shown, next_cursor=str(more) if more < len(items) else None)

    return await find(page, name, noun="approval", listing="nekro approvals")


async def test_an_id_is_found_on_a_later_page_also_by_a_number() -> None:
    items = [Listed(id="dead"), Listed(id="beef", number=17), Listed(id="beefs")]
    assert [await found(name, *items) for name in ("de", "17", "#17", "beef")] == [
        "dead",
        "beef",
        "beef",
        "beef",
    ]
    with pytest.raises(UsageError, match="several ids begin with be;"):
        await found("be", *items)
    with pytest.raises(NotFoundError, match="no approval has the id 1; `nekro approvals` lists them"):
        await found("1", *items)


async def test_an_item_that_a_gateway_of_an_earlier_release_did_not_filter_is_not_found() -> None:
    async def page(*, beginning: str, cursor: str | None, limit: int) -> Page[Listed]:
        return Page(items=[Listed(id="beef", number=4)])

    with pytest.raises(NotFoundError):
        await find(page, "dead", noun="approval", listing="nekro approvals")


async def test_a_whole_id_is_not_looked_for() -> None:
    """A key of one chat has the approval, but not the list of all chats."""

    async def page(**_: object) -> Page[Listed]:
        raise AssertionError

    assert await find(page, "0" * 32, noun="approval", listing="nekro approvals") == "0" * 32
