"""The Redis server of a data directory, and the settings derived from the directory."""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from broker_config.embedded import EmbeddedRedis, resolve_settings, resolve_signing_key, socket_path
from broker_config.settings import Settings
from broker_config.urls import redis_address
from nekro_agent.errors import BrokerUnavailableError, SettingsError


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    return tmp_path / "data"


@pytest.fixture
def server(data_dir: Path) -> Iterator[EmbeddedRedis]:
    server = EmbeddedRedis(data_dir)
    server.start()
    yield server
    server.stop()


def test_data_survives_a_stop_and_a_start(server: EmbeddedRedis) -> None:
    with redis.Redis.from_url(redis_address(server.url).server_url) as client:
        client.set("key", "value")
    server.stop()
    assert not server.answers()
    server.start()
    with redis.Redis.from_url(redis_address(server.url).server_url) as client:
        assert client.get("key") == b"value"


def test_second_user_attaches_and_the_last_user_stops_the_server(
    server: EmbeddedRedis, data_dir: Path
) -> None:
    second = EmbeddedRedis(data_dir)
    second.start()
    server.stop()
    assert second.answers(), "the server is stopped although it is in use"
    second.stop()
    assert not second.answers()


def test_concurrent_starters_start_one_server(data_dir: Path) -> None:
    servers = [EmbeddedRedis(data_dir) for _ in range(8)]
    threads = [threading.Thread(target=server.start) for server in servers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    pids = set()
    for server in servers:
        with redis.Redis.from_url(redis_address(server.url).server_url) as client:
            pids.add(client.info("server")["process_id"])
    for server in servers:
        server.stop()
    assert len(pids) == 1


def test_long_data_directory_falls_back_to_a_short_socket_path(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 60) / ("e" * 60)
    server = EmbeddedRedis(deep)
    assert len(os.fsencode(server.socket)) <= 100
    server.start()
    try:
        assert server.answers()
        assert stat.S_IMODE(server.socket.parent.stat().st_mode) == 0o700
    finally:
        server.stop()


def test_socket_directory_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    deep = tmp_path / ("d" * 60) / ("e" * 60)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    socket_path(deep).parent.symlink_to(elsewhere)
    with pytest.raises(BrokerUnavailableError, match="not a directory of this user"):
        EmbeddedRedis(deep).start()


def test_settings_are_filled_in_from_the_data_directory(data_dir: Path) -> None:
    settings = resolve_settings(Settings.load(env_file=None, data_dir=data_dir))
    assert settings.broker.url == settings.results.url == f"redis+socket://{data_dir}/run/redis.sock"
    assert settings.database.url == f"sqlite:///{data_dir}/nekro.db"
    assert settings.security.signing_key is not None


def test_explicit_settings_are_unchanged(data_dir: Path) -> None:
    settings = Settings.load(
        env_file=None,
        data_dir=data_dir,
        broker={"url": "redis://one/0"},
        results={"url": "redis://two/0"},
        database={"url": "postgresql://three/db"},
        security={"signing_key": "key"},
    )
    assert resolve_settings(settings) == settings
    assert not data_dir.exists()


def test_rabbitmq_without_a_url_for_results_is_refused(data_dir: Path) -> None:
    settings = Settings.load(env_file=None, data_dir=data_dir, broker={"url": "amqp://h//"})
    with pytest.raises(SettingsError, match="NEKRO_RESULTS__URL"):
        resolve_settings(settings)


def test_signing_key_is_created_once_and_private(data_dir: Path) -> None:
    settings = Settings.load(env_file=None, data_dir=data_dir)
    keys = []
    threads = [threading.Thread(target=lambda: keys.append(resolve_signing_key(settings))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(keys) == 8
    assert len({key.get_secret_value() for key in keys}) == 1
    path = data_dir / "secrets" / "signing.key"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [entry.name for entry in path.parent.iterdir()] == ["signing.key"]


def test_signing_key_readable_by_others_is_refused(data_dir: Path) -> None:
    settings = Settings.load(env_file=None, data_dir=data_dir)
    resolve_signing_key(settings)
    path = data_dir / "secrets" / "signing.key"
    path.chmod(0o644)
    with pytest.raises(SettingsError, match="chmod 600"):
        resolve_signing_key(settings)
