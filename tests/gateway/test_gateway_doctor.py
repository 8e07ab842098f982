"""What `nekro doctor` says about the keys of the API and about the gateway of the host."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from typing import Any

import pytest
from gateway_server import served
from redis_process import free_port
from test_gateway_keys import key_of
from worker_fleet import Fleet

from broker_config.settings import Settings
from nekro.cli.doctor.service_checks import Check, CheckState, gateway_checks
from nekro.gateway.app import create_app
from nekro.gateway.web.server import serve
from nekro.operations.actor import Scope
from nekro.operations.keys import revoke_stored_key
from storage.engine import Database

pytestmark = pytest.mark.parametrize("fresh_fleet", ["sqlite"], indirect=True)


def at(settings: Settings, **gateway: Any) -> Settings:
    return settings.model_copy(update={"gateway": settings.gateway.model_copy(update=gateway)})


async def checked(settings: Settings) -> tuple[Check, Check]:
    keys, gateway = await gateway_checks(settings)
    assert (keys.name, gateway.name) == ("API keys", "gateway")
    return keys, gateway


async def test_keys_are_counted_and_a_gateway_that_refuses_everybody_is_a_warning(
    fresh_fleet: Fleet,
) -> None:
    settings = at(fresh_fleet.settings, port=free_port())
    keys, _ = await checked(settings)
    assert keys.verdict is CheckState.OK and "none" in keys.detail
    made = [(await key_of(fresh_fleet, Scope.READ))["Authorization"].split("_")[1] for _ in range(2)]
    database = Database(settings.database, settings.data_dir)
    try:
        await revoke_stored_key(database, made[0], by=None, request_id=None)
        keys, _ = await checked(settings)
        assert (keys.verdict, keys.detail) == (CheckState.OK, "1 valid of 2")
        await revoke_stored_key(database, made[1], by=None, request_id=None)
    finally:
        await database.dispose()
    keys, _ = await checked(settings)
    assert (keys.verdict, keys.detail) == (CheckState.WARNING, "0 valid of 2")
    assert "nekro keys create" in keys.fix


async def test_a_gateway_that_is_not_ready_is_a_warning(fresh_fleet: Fleet) -> None:
    port = free_port()
    _, gateway = await checked(at(fresh_fleet.settings, port=port))
    assert gateway.verdict is CheckState.OK and f"none at 127.0.0.1:{port}" in gateway.detail
    app = create_app(fresh_fleet.settings)
    async with served(app) as client:
        await client.get("/healthz")  # answered when the services have started
        port = client.base_url.port or 0
        for host in ("127.0.0.1", "0.0.0.0"):
            _, gateway = await checked(at(fresh_fleet.settings, host=host, port=port))
            assert (gateway.verdict, gateway.detail) == (CheckState.OK, f"127.0.0.1:{port} is ready")
        app.state.stopping.set()
        _, gateway = await checked(at(fresh_fleet.settings, port=port))
        assert gateway.verdict is CheckState.WARNING and "503" in gateway.detail and gateway.fix


async def test_a_gateway_on_a_unix_socket_is_found(fresh_fleet: Fleet, tmp_path: Path) -> None:
    path = tmp_path / "gateway.sock"
    settings = at(fresh_fleet.settings, socket=path)
    _, gateway = await checked(settings)
    assert gateway.verdict is CheckState.OK and f"none at {path}" in gateway.detail
    await key_of(fresh_fleet, Scope.READ)
    ready = asyncio.Event()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        serving = asyncio.create_task(
            serve(create_app(settings), listener, on_ready=lambda _url: ready.set())
        )
        await ready.wait()
        try:
            _, gateway = await checked(settings)
            assert (gateway.verdict, gateway.detail) == (CheckState.OK, f"{path} is ready")
        finally:
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)
