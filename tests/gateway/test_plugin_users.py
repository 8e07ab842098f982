"""Whose requests the routes of plugins serve: those of the holders of keys."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from gateway_server import served
from local_key import local_headers_of
from waiting import eventually
from worker_fleet import Fleet

from nekro.gateway.app import create_app
from nekro.operations.actor import Scope
from nekro.operations.keys import new_key, store_key

pytestmark = pytest.mark.parametrize("fresh_fleet", ["sqlite"], indirect=True)

URL = "/plugins/Ada.web_members"


async def answers(client: httpx.AsyncClient, key: str | None = None) -> list[Any]:
    """What the plugin's routes answer to a key: texts, or the status of a refusal."""
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    found = [
        await client.get(f"{URL}/me", headers=headers),
        await client.get(f"{URL}/settings/theme", headers=headers),
        await client.delete(f"{URL}/all", headers=headers),
    ]
    return [answer.json() if answer.is_success else answer.status_code for answer in found]


@pytest.mark.parametrize("access", ["open", "plugin", "key"])
async def test_routes_know_the_holder_of_the_key(fresh_fleet: Fleet, access: str) -> None:
    fresh_fleet.start("long")
    values = {"plugin_http": (f"Ada.web_members={access}",)}
    settings = fresh_fleet.settings
    settings = settings.model_copy(update={"gateway": settings.gateway.model_copy(update=values)})
    app = create_app(settings)
    async with served(app, with_key=False) as client:
        local = local_headers_of(app)

        async def is_served() -> bool:
            return (await client.get(f"{URL}/me", headers=local)).status_code < 500

        await eventually(is_served, what="the plugin is served")
        # The key of this host may do everything.
        held = await answers(client, local["Authorization"].removeprefix("Bearer "))
        assert held == [["gateway", "gateway", 3, True], "theme for gateway", "removed"]
        services = fresh_fleet.services()
        keys = {}
        for name, scopes in (
            ("user", [Scope.CALL]),
            ("admin", [Scope.CALL, Scope.ADMIN]),
            ("none", [Scope.READ]),
        ):
            stored, keys[name] = new_key(name, scopes=scopes, user_id="ü1" if name == "user" else None)
            await store_key(services.database, stored, by=None, request_id=None)
            keys[f"id of {name}"] = f"key:{stored.id}"
        await services.database.dispose()
        assert await answers(client, keys["user"]) == [["ü1", "ü1", 1, False], 403, 403]
        admin = keys["id of admin"]
        assert await answers(client, keys["admin"]) == [
            [admin, admin, 3, True], f"theme for {admin}", "removed",
        ]  # fmt: skip
        without_scope = 403 if access == "key" else 401
        assert await answers(client, keys["none"]) == [without_scope] * 3
        assert await answers(client, "of.another.service") == [401] * 3
        assert await answers(client) == [401] * 3
