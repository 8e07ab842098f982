"""Checks of the HTTP API: its keys, and the gateway at the address of the settings."""

from __future__ import annotations

import contextlib

from broker_config.settings import Settings
from nekro.cli.doctor.check import Check, Verdict
from nekro_agent.errors import StorageError
from nekro_agent.shared_clock import shared_time
from storage.driver.urls import exists

__all__ = ["gateway_checks"]

#: A gateway of this host answers at once or hangs.
_PROBE_SECONDS = 2.0


async def gateway_checks(settings: Settings) -> list[Check]:
    """Check the keys in the database, and whether a gateway answers."""
    checks = []
    with contextlib.suppress(StorageError):  # the database has a check of its own
        checks.append(await _keys(settings))
    return [*checks, await _gateway(settings)]


async def _keys(settings: Settings) -> Check:
    if not exists(settings.database, settings.data_dir):
        return Check(name="API keys", verdict=Verdict.OK, detail="none: gateways serve their own host only")
    from storage.engine import Database

    async with Database(settings.database, settings.data_dir) as database, database.read() as transaction:
        keys = await transaction.keys.all()
    if not keys:
        return Check(name="API keys", verdict=Verdict.OK, detail="none: gateways serve their own host only")
    now = shared_time()
    valid = [
        key for key in keys if key.revoked_at is None and (key.expires_at is None or key.expires_at > now)
    ]
    return Check(
        name="API keys",
        verdict=Verdict.OK if valid else Verdict.WARNING,
        detail=f"{len(valid)} valid of {len(keys)}",
        fix="" if valid else "create one with `nekro keys create`, as every request needs a key",
    )


async def _gateway(settings: Settings) -> Check:
    import httpx

    from nekro_client.answer_limits import limited

    gateway = settings.gateway
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(gateway.host, gateway.host)  # noqa: S104 - compared
    where = str(gateway.socket) if gateway.socket else f"{host}:{gateway.port}"
    url = (
        "http://localhost"
        if gateway.socket
        else f"http://{f'[{host}]' if ':' in host else host}:{gateway.port}"
    )
    transport = httpx.AsyncHTTPTransport(uds=str(gateway.socket)) if gateway.socket else None
    try:
        async with httpx.AsyncClient(
            transport=transport,
            timeout=_PROBE_SECONDS,
            trust_env=False,
            event_hooks=limited(),
        ) as client:
            answer = await client.get(f"{url}/readyz")
    except httpx.TransportError:
        return Check(
            name="gateway", verdict=Verdict.OK, detail=f"none at {where}; `nekro gateway` starts one there"
        )
    return Check(
        name="gateway",
        verdict=Verdict.OK if answer.is_success else Verdict.WARNING,
        detail=f"{where} is ready"
        if answer.is_success
        else f"{where} answers /readyz with {answer.status_code}",
        fix="" if answer.is_success else "look into its log: its database does not answer, or it is stopping",
    )
