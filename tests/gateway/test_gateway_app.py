"""The application of a gateway, served over a socket."""

from __future__ import annotations

from gateway_server import served
from worker_fleet import Fleet

from gateway.app import create_app


async def test_probes_answer(fleet: Fleet) -> None:
    async with served(create_app(fleet.settings)) as client:
        assert (await client.get("/healthz")).json() == {"ok": True}
        assert (await client.get("/readyz")).json() == {"ok": True}


async def test_an_unknown_path_is_a_problem_document(fleet: Fleet) -> None:
    async with served(create_app(fleet.settings)) as client:
        answer = await client.get("/nothing")
    assert answer.status_code == 404
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.json()["code"] == "not_found"
