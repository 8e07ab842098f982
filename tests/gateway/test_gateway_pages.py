"""Pages of every list: the last one has no cursor, and pages together are the list."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import httpx
import pytest

from nekro.app.services import Services
from nekro.wire.values import encode_arguments
from storage.accounts.approvals import NewApproval
from storage.repositories.jobs import NewJob

CHAT = "pages"
#: Items of each list, and of each page but one.
COUNT = 4


async def add_jobs(services: Services) -> None:
    async with services.database.begin() as tx:
        for number in range(COUNT):
            await tx.jobs.add(
                NewJob(type="t", task_id=f"j{number}", plugin_key="a.b", chat_key=CHAT, args=[])
            )


async def add_timers(services: Services) -> None:
    async with services.database.begin() as tx:
        for number in range(COUNT):
            at = datetime.now(UTC) + timedelta(days=1)
            await tx.timers.add(CHAT, fire_at=at, description=f"t{number}")


async def add_approvals(services: Services) -> None:
    async with services.database.begin() as tx:
        for number in range(COUNT):
            new = NewApproval(
                id=f"{number:032x}"[::-1], call_id=f"call{number}", chat_key=CHAT, turn_id=None,
                round_id=None, root_turn_id=None, user_id=None, method="tests.m.f", lane="methods",
                arguments=encode_arguments((), {}), digest="0" * 64,
                expires_at=datetime.now(UTC) + timedelta(days=1),
            )  # fmt: skip
            await tx.approvals.add(new)


async def add_acts(services: Services) -> None:
    async with services.database.begin() as tx:
        for number in range(COUNT):
            await tx.audit.add("job.cancel", f"j{number}", key_id=None)


LISTS: dict[str, Callable[[Services], Awaitable[None]]] = {
    "jobs": add_jobs,
    "timers": add_timers,
    "approvals": add_approvals,
    "audit": add_acts,
}
#: Lists with the parameter ``id``.
WITH_BEGINNING = ("jobs", "timers", "approvals")


@pytest.mark.parametrize("path", LISTS)
async def test_the_last_page_of_a_list_has_no_cursor(
    services: Services, http: httpx.AsyncClient, path: str
) -> None:
    async with services.database.begin() as tx:
        await tx.chats.ensure(CHAT)
    await LISTS[path](services)

    async def page(**params: Any) -> dict[str, Any]:
        answer = await http.get(f"/api/v1/{path}", params=params)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    whole = await page(limit=COUNT)
    assert (len(whole["items"]), whole["next_cursor"]) == (COUNT, None)
    first = await page(limit=COUNT // 2)
    second = await page(limit=COUNT // 2, cursor=first["next_cursor"])
    assert [*first["items"], *second["items"]] == whole["items"]
    assert second["next_cursor"] is None
    if path in WITH_BEGINNING:
        one = whole["items"][1]["id"]
        assert [item["id"] for item in (await page(id=one[:-1]))["items"]] == [one]
        assert (await page(id="no-such"))["items"] == []
