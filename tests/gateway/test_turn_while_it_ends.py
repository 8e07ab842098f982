"""The tree of a turn that ends between two statements of its reading."""

from __future__ import annotations

from typing import Any

import pytest
from gateway_server import served
from worker_fleet import Fleet

from nekro.gateway.app import create_app
from nekro.operations import turns as turn_tree


async def test_a_turn_that_ends_while_it_is_read_is_not_over_with_open_rounds(
    fresh_fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_rounds = turn_tree._rounds
    async with served(create_app(fresh_fleet.settings)) as http:
        body = {"text": "hello", "user_id": "ada"}
        posted = (await http.post("/api/v1/chats/ends/messages", json=body)).json()
        path = f"/api/v1/turns/{posted['turn_id']}"

        async def rounds(transaction: Any, turn_id: str) -> Any:
            found = await read_rounds(transaction, turn_id)
            monkeypatch.setattr(turn_tree, "_rounds", read_rounds)
            cancelled = await http.post(f"{path}/cancel")
            assert cancelled.json()["state"] == "cancelled", cancelled.text
            return found

        monkeypatch.setattr(turn_tree, "_rounds", rounds)
        torn = (await http.get(path)).json()
        assert (torn["finished_at"], [one["state"] for one in torn["rounds"]]) == (None, ["requested"])
        whole = (await http.get(path)).json()
        assert whole["finished_at"] and [one["state"] for one in whole["rounds"]] == ["cancelled"]
