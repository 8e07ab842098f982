"""Three redis-servers and three Sentinels as processes of a test, on loopback ports of their own."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry
from redis_process import RedisServer, dying_with_parent, free_port, server_binary
from waiting import WAIT_SECONDS, wait_until

MASTER = "calls"
#: Seconds of silence after which the Sentinels replace a primary.
DOWN_SECONDS = 1
#: A port without a listener.
NOWHERE = 1


class SentinelGroup:
    """One primary with two replicas, watched by three Sentinels; a context manager."""

    def __init__(
        self,
        directory: Path,
        *,
        password: str | None = None,
        sentinel_password: str | None = None,
        tls_options: Sequence[str] = (),
        binary: str | None = None,
    ) -> None:
        """Start nothing yet.

        Args:
            tls_options: options with which every server and Sentinel also listens with TLS, on a second port.
        """
        self._tls_options = tls_options
        self._binary = binary or server_binary()
        #: TLS ports of the servers and of the Sentinels; empty without TLS.
        self.tls_ports = [free_port() for _ in range(3)] if tls_options else []
        self.sentinel_tls_ports = [free_port() for _ in range(3)] if tls_options else []
        self._directory, self._password, self._sentinel_password = directory, password, sentinel_password
        self.servers: list[RedisServer] = []
        self._sentinels: list[subprocess.Popen[bytes]] = []
        self.sentinel_ports = [free_port() for _ in range(3)]

    def __enter__(self) -> SentinelGroup:
        try:
            for number in range(3):
                self._start_server(number)
            for number, port in enumerate(self.sentinel_ports):
                self._start_sentinel(number, port)
            wait_until(self.is_complete, what="the Sentinels to know each other and the replicas")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._sentinels:
            process.kill()
            process.wait()
        for server in self.servers:
            server.kill()

    @property
    def url(self) -> str:
        """URL of the list of Sentinels, with TLS where they have it."""
        if self.sentinel_tls_ports:
            return ";".join(f"sentinels://127.0.0.1:{port}/0" for port in self.sentinel_tls_ports)
        userinfo = f":{quote(self._password, safe='')}@" if self._password else ""
        return ";".join(f"sentinel://{userinfo}127.0.0.1:{port}/0" for port in self.sentinel_ports)

    def settings(self) -> dict[str, Any]:
        """Values of the group ``broker`` of the settings."""
        return {
            "url": self.url,
            "sentinel_master": MASTER,
            "sentinel_password": self._sentinel_password,
        }

    def primary(self) -> RedisServer:
        """The primary according to the Sentinels."""
        port = int(self.state()["port"])
        return next(server for number, server in enumerate(self.servers) if self._port_of(number) == port)

    def state(self) -> dict[str, Any]:
        """The first Sentinel's state of the primary."""
        with self._client(self.sentinel_ports[0], self._sentinel_password) as client:
            found: dict[str, Any] = client.sentinel_master(MASTER)
            return found

    def is_complete(self) -> bool:
        """Whether every Sentinel knows the others and two connected replicas."""
        for port in self.sentinel_ports:
            with self._client(port, self._sentinel_password) as client:
                try:
                    state: Any = client.sentinel_master(MASTER)
                    replicas: Any = client.sentinel_slaves(MASTER)
                except redis.RedisError:
                    return False
            if state["num-other-sentinels"] < 2 or len(replicas) < 2:
                return False
            if not all(replica["master-link-status"] == "ok" for replica in replicas):
                return False
        return True

    def cut_off(self) -> RedisServer:
        """Stop the replication of later writes; returns the primary.

        The Sentinels reconnect the replicas after some 8 s.
        """
        primary = self.primary()
        for server in self.servers:
            if server is not primary:
                with self._client(server.port, self._password) as client:
                    client.replicaof("127.0.0.1", NOWHERE)  # type: ignore[no-untyped-call]
        return primary

    def wait_for_failover(self, old: RedisServer, *, seconds: float = WAIT_SECONDS) -> RedisServer:
        """Wait until the Sentinels name another primary, which accepts writes."""

        def promoted() -> RedisServer | None:
            found = self.primary()
            if found is old:
                return None
            with self._client(found.port, self._password) as client:
                return found if client.role()[0] == b"master" else None  # type: ignore[no-untyped-call]

        server: RedisServer = wait_until(promoted, seconds=seconds, what="a replica to be promoted")
        return server

    def wait_for_demotion(self, server: RedisServer) -> None:
        """Wait until a replaced primary follows the new one, with its data."""

        def follows() -> bool:
            with self._client(server.port, self._password) as client:
                try:
                    role: Any = client.role()  # type: ignore[no-untyped-call]
                except redis.RedisError:  # the Sentinels close its connections when they demote it
                    return False
                return bool(role[0] == b"slave" and role[3] == b"connected")

        wait_until(follows, what="the replaced primary to be demoted")

    def freeze(self, server: RedisServer) -> None:
        """SIGSTOP a server: its host is unreachable, its connections stay open."""
        assert server.process is not None
        server.process.send_signal(signal.SIGSTOP)

    def thaw(self, server: RedisServer) -> None:
        """SIGCONT a server."""
        assert server.process is not None
        server.process.send_signal(signal.SIGCONT)

    def _port_of(self, number: int) -> int:
        """The port by which servers and Sentinels identify a server."""
        return self.tls_ports[number] if self.tls_ports else self.servers[number].port

    def _start_server(self, number: int) -> None:
        directory = self._directory / f"redis{number}"
        directory.mkdir()
        options = ["--repl-diskless-sync-delay", "0", "--replica-serve-stale-data", "yes"]
        if self._tls_options:
            options += [*self._tls_options, "--tls-replication", "yes"]
            options += ["--tls-port", str(self.tls_ports[number])]
        if self.servers:
            options += ["--replicaof", "127.0.0.1", str(self._port_of(0))]
        if self._password is not None:
            options += ["--requirepass", self._password, "--masterauth", self._password]
        server = RedisServer(directory, options=options, password=self._password, binary=self._binary)
        self.servers.append(server)
        server.start()

    def _start_sentinel(self, number: int, port: int) -> None:
        directory = self._directory / f"sentinel{number}"
        directory.mkdir()
        configuration = directory / "sentinel.conf"
        lines = [
            f"port {port}", "bind 127.0.0.1", f"dir {directory}",
            f"sentinel monitor {MASTER} 127.0.0.1 {self._port_of(0)} 2",
            f"sentinel down-after-milliseconds {MASTER} {DOWN_SECONDS * 1000}",
            f"sentinel failover-timeout {MASTER} 5000",
            f"sentinel parallel-syncs {MASTER} 2",
        ]  # fmt: skip
        if self._password is not None:
            lines.append(f"sentinel auth-pass {MASTER} {self._password}")
        if self._sentinel_password is not None:
            word = self._sentinel_password
            lines += [f"requirepass {word}", f"sentinel sentinel-pass {word}"]
        if self._tls_options:
            pairs = zip(self._tls_options[::2], self._tls_options[1::2], strict=True)
            lines += [f"tls-port {self.sentinel_tls_ports[number]}", "tls-replication yes"]
            lines += [f"{name.removeprefix('--')} {value}" for name, value in pairs]
        configuration.write_text("\n".join(lines) + "\n")
        with (directory / "log").open("wb") as log:
            self._sentinels.append(
                subprocess.Popen(
                    [*dying_with_parent(), self._binary, str(configuration), "--sentinel"], stdout=log
                )
            )

    @staticmethod
    def _client(port: int, password: str | None) -> redis.Redis:
        return redis.Redis(port=port, password=password, socket_timeout=2, retry=Retry(NoBackoff(), 0))
