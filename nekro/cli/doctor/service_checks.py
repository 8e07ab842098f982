"""Checks of `nekro doctor` for broker, database, clocks, approvals and HTTP API, and the result of a check.

Clocks: this host's is compared with those of the broker and of the database.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

from broker_config.embedded import EmbeddedRedis, redis_binary
from broker_config.partitions import server_settings
from broker_config.primaries import NotPrimaryError
from broker_config.redis_endpoint import RedisEndpoint, server_version
from broker_config.settings import Settings
from broker_config.urls import is_drained, is_redis, without_password
from nekro.cli.running import ExitCode
from nekro_agent.errors import NekroError, SettingsError, StorageError, StorageUnavailableError
from nekro_agent.shared_clock import shared_time
from storage.driver.urls import exists

__all__ = [
    "Check",
    "CheckState",
    "approval_checks",
    "broker_checks",
    "clock_checks",
    "clock_offsets",
    "database_check",
    "gateway_checks",
]

_MIN_REDIS: Final = (6, 2)
#: A gateway of this host answers at once or hangs.
_PROBE_SECONDS: Final = 2.0


class CheckState(StrEnum):
    """How a check ended."""

    #: No problem was found.
    OK = "ok"
    #: Works, but not as well as it could, or not yet.
    WARNING = "warning"
    #: Something will not work.
    FAILED = "failed"


@dataclass(frozen=True, kw_only=True)
class Check:
    """The result of one check: one line of `nekro doctor`."""

    name: str
    verdict: CheckState
    detail: str
    #: Suggested fix; "" when none is needed.
    fix: str = ""
    #: Exit code of the command when this is the first failure.
    code: ExitCode = ExitCode.FAILED


def broker_checks(settings: Settings) -> list[Check]:
    """Check the broker and the result backend: Redis of this system, a server, or another broker. Blocks."""
    if settings.broker.url is None:
        checks = [_embedded_redis(settings)]
    elif is_redis(settings.broker.url):
        checks = [_redis_server(settings, settings.broker.url, name="redis", variable="NEKRO_BROKER__URL")]
    else:
        checks = [_other_broker(settings, settings.broker.url)]
    for number, one in enumerate(server_settings(settings)[1:]):
        checks.append(_partition(one, listed=settings.broker.partitions[number], name=f"redis {number + 2}"))
    if settings.results.url is not None and settings.results.url != settings.broker.url:
        checks.append(
            _redis_server(settings, settings.results.url, name="results", variable="NEKRO_RESULTS__URL")
        )
    return checks


def _partition(settings: Settings, *, listed: str, name: str) -> Check:
    """Check a further server that chats are partitioned over.

    Args:
        settings: with the server as the broker.
        listed: its URL as the settings name it.
    """
    check = _redis_server(settings, settings.broker.url or "", name=name, variable="NEKRO_BROKER__PARTITIONS")
    if check.verdict is CheckState.FAILED:
        return replace(check, detail=f"{check.detail}; its chats wait")
    if not is_drained(listed):
        return check
    from broker_config.app import create_app
    from nekro.broker.broker_figures import read_brokers

    app = create_app(settings)
    try:
        left = read_brokers(app)[0].messages
    finally:
        app.close()
    state = f"{left} messages left" if left else "empty: it can go from NEKRO_BROKER__PARTITIONS"
    return replace(check, detail=f"{check.detail}; drained, {state}")


def _embedded_redis(settings: Settings) -> Check:
    try:
        binary = redis_binary()
    except NekroError as exc:
        return Check(name="redis", verdict=CheckState.FAILED, detail=str(exc), code=ExitCode.BROKER)
    # Not EmbeddedRedis.start: `nekro doctor` starts nothing.
    state = (
        "running" if EmbeddedRedis(settings.data_dir).answers() else "started by the commands that need it"
    )
    return Check(name="redis", verdict=CheckState.OK, detail=f"embedded ({binary}), {state}")


def _redis_server(settings: Settings, url: str, *, name: str, variable: str) -> Check:
    from broker_config.redis_library import redis

    def unsuitable(kind: str) -> Check:
        return Check(
            name=name,
            verdict=CheckState.FAILED,
            detail=f"{without_password(url)} is {kind}",
            fix=f"name a primary outside of a cluster in {variable}, or Sentinels (sentinel://)",
            code=ExitCode.BROKER,
        )

    try:
        with RedisEndpoint(settings.broker, url).client() as client:
            server = client.info()
    except SettingsError as exc:
        return Check(name=name, verdict=CheckState.FAILED, detail=str(exc), code=ExitCode.USAGE)
    except NotPrimaryError:
        return unsuitable("a replica")
    except (redis.RedisError, OSError, ValueError) as exc:
        return Check(
            name=name,
            verdict=CheckState.FAILED,
            detail=f"{without_password(url)} does not answer ({exc})",
            fix=f"start Redis there, or correct {variable}",
            code=ExitCode.BROKER,
        )
    version = server_version(server)
    if tuple(int(part) for part in str(server["redis_version"]).split(".")[:2]) < _MIN_REDIS:
        return Check(
            name=name,
            verdict=CheckState.FAILED,
            detail=f"{without_password(url)} is {version}",
            fix="use 6.2 or newer",
            code=ExitCode.BROKER,
        )
    if server.get("redis_mode") == "cluster":
        return unsuitable("part of a Redis Cluster")
    faults = _redis_faults(server)
    return Check(
        name=name,
        verdict=CheckState.WARNING if faults else CheckState.OK,
        detail=f"{without_password(url)}, {version}, key prefix {settings.broker.key_prefix!r}"
        + "".join(f"; {fault}" for fault, _ in faults),
        fix="; ".join(fix for _, fix in faults),
    )


def _redis_faults(server: dict[str, object]) -> list[tuple[str, str]]:
    """Return (problem, fix) for each setting of the Redis server that can lose messages."""
    faults = []
    policy = str(server.get("maxmemory_policy", "noeviction"))
    if policy != "noeviction":
        faults.append((f"evicts keys when full ({policy})", "CONFIG SET maxmemory-policy noeviction"))
    if not server.get("aof_enabled"):
        faults.append(("loses queued messages when it restarts", "CONFIG SET appendonly yes"))
    return faults


def _other_broker(settings: Settings, url: str) -> Check:
    from nekro.cli.services.presence import require_broker

    try:
        require_broker(settings)
    except NekroError as exc:
        return Check(name="broker", verdict=CheckState.FAILED, detail=str(exc), code=ExitCode.BROKER)
    return Check(name="broker", verdict=CheckState.OK, detail=without_password(url))


async def database_check(settings: Settings) -> Check:
    """Check whether the database can be used: it answers, has this release's schema, and pools as stated."""
    from storage.driver.urls import SQLITE_FILE_NAME
    from storage.migrate import check

    if settings.database.url is None and not (settings.data_dir / SQLITE_FILE_NAME).exists():
        # Connecting would create the file.
        return Check(name="database", verdict=CheckState.OK, detail="SQLite, created by the first command")
    try:
        status = await check(settings.database, settings.data_dir)
    except SettingsError as exc:
        return Check(name="database", verdict=CheckState.FAILED, detail=str(exc), code=ExitCode.USAGE)
    if not status.reachable:
        return Check(
            name="database",
            verdict=CheckState.FAILED,
            detail=f"{status.url} cannot be reached: {status.problem}",
            fix="start it, or correct NEKRO_DATABASE__URL",
            code=ExitCode.STORAGE,
        )
    where = f"{status.url}, {status.server}"
    if status.pool_mode is not None:
        where += f", pool mode {status.pool_mode}"
    if status.migrated:
        if status.pool_mode is not None and (fault := await _pooling_fault(settings)):
            return Check(
                name="database",
                verdict=CheckState.FAILED,
                detail=f"{where}: {fault}",
                fix="correct pool_mode in NEKRO_DATABASE__URL",
                code=ExitCode.STORAGE,
            )
        newer = f" of a newer version (this one has {status.head})" if status.is_newer else ""
        return Check(
            name="database", verdict=CheckState.OK, detail=f"{where}, schema {status.revision}{newer}"
        )
    return Check(
        name="database",
        verdict=CheckState.FAILED,
        detail=f"{where}, has schema {status.revision or 'none'} and needs {status.head}",
        fix="run `nekro db upgrade`" + (" of release 0.2.0 first" if status.too_old else ""),
        code=ExitCode.STORAGE,
    )


async def _pooling_fault(settings: Settings) -> str:
    """Return why a worker would refuse this PostgreSQL, whose schema is right; "" when it would not."""
    from storage.engine import Database
    from storage.migrate import require_schema

    try:
        async with Database(settings.database, settings.data_dir) as database:
            await require_schema(database)
    except StorageUnavailableError as exc:
        return str(exc)
    return ""


async def approval_checks(settings: Settings) -> list[Check]:
    """Check whether calls wait for so long that they will expire soon; none without a database."""
    if not exists(settings.database, settings.data_dir):
        return []
    with contextlib.suppress(StorageError):  # the database has a check of its own
        return [await _pending(settings)]
    return []


async def _pending(settings: Settings) -> Check:
    from storage.engine import Database

    async with Database(settings.database, settings.data_dir) as database, database.read() as transaction:
        work = await transaction.overview.approvals()
    if not work.waiting:
        return Check(name="approvals", verdict=CheckState.OK, detail="no call waits")
    is_old = work.oldest_seconds > settings.approval.pending_seconds / 2
    return Check(
        name="approvals",
        verdict=CheckState.WARNING if is_old else CheckState.OK,
        detail=f"{work.waiting} calls wait, the oldest for {work.oldest_seconds:.0f} s of "
        f"{settings.approval.pending_seconds:.0f} s",
        fix="decide on them with `nekro approvals` before they expire" if is_old else "",
    )


async def gateway_checks(settings: Settings) -> list[Check]:
    """Check the keys in the database, and whether a gateway answers."""
    checks = []
    with contextlib.suppress(StorageError):  # the database has a check of its own
        checks.append(await _keys(settings))
    return [*checks, await _gateway(settings)]


async def _keys(settings: Settings) -> Check:
    if not exists(settings.database, settings.data_dir):
        return Check(
            name="API keys", verdict=CheckState.OK, detail="none: gateways serve their own host only"
        )
    from storage.engine import Database

    async with Database(settings.database, settings.data_dir) as database, database.read() as transaction:
        keys = await transaction.keys.all()
    if not keys:
        return Check(
            name="API keys", verdict=CheckState.OK, detail="none: gateways serve their own host only"
        )
    now = shared_time()
    valid = [
        key for key in keys if key.revoked_at is None and (key.expires_at is None or key.expires_at > now)
    ]
    return Check(
        name="API keys",
        verdict=CheckState.OK if valid else CheckState.WARNING,
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
            name="gateway", verdict=CheckState.OK, detail=f"none at {where}; `nekro gateway` starts one there"
        )
    return Check(
        name="gateway",
        verdict=CheckState.OK if answer.is_success else CheckState.WARNING,
        detail=f"{where} is ready"
        if answer.is_success
        else f"{where} answers /readyz with {answer.status_code}",
        fix="" if answer.is_success else "look into its log: its database does not answer, or it is stopping",
    )


async def clock_checks(settings: Settings) -> list[Check]:
    """Return one check for each clock that can be compared."""
    try:
        offsets = await clock_offsets(settings)
    except SettingsError:  # reported by the check of the database
        return []
    return [_clock_check(f"clock of the {name}", seconds) for name, seconds in offsets.items()]


def _clock_check(name: str, ahead_seconds: float) -> Check:
    from nekro.app.clock_watch import WARN_SECONDS

    off = abs(ahead_seconds)
    if off <= WARN_SECONDS:
        return Check(name=name, verdict=CheckState.OK, detail=f"within {WARN_SECONDS:g} s of this host's")
    side = "ahead of" if ahead_seconds > 0 else "behind"
    return Check(
        name=name,
        verdict=CheckState.FAILED if off > 10 * WARN_SECONDS else CheckState.WARNING,
        detail=f"this host's clock is {off:.1f} s {side} it; deadlines of calls follow the database's clock, "
        "but plugins, logs and files here use this host's",
        fix="synchronise the clocks of all hosts (`timedatectl set-ntp true`, or chrony)",
    )


async def clock_offsets(settings: Settings, *, clock: Callable[[], float] = time.time) -> dict[str, float]:
    """Return by how many seconds this host's clock is ahead of each server's clock; negative: behind.

    Left out are servers that do not answer, and embedded Redis and SQLite, which use this host's clock.

    Args:
        clock: this host's, in seconds since 1970.
    """
    from broker_config.redis_library import redis
    from nekro.broker.broker_figures import read_broker_clock
    from storage.engine import Database, read_database_clock

    offsets = {}
    with contextlib.suppress(redis.RedisError, OSError):
        reading = await read_broker_clock(settings.broker, host_clock=clock)
        if reading is not None:
            offsets["broker"] = reading.ahead_seconds
    database = Database(settings.database, settings.data_dir)
    if not database.is_sqlite:
        with contextlib.suppress(NekroError):
            reading = await read_database_clock(database, host_clock=clock)
            offsets["database"] = reading.ahead_seconds
        await database.dispose()
    return offsets
