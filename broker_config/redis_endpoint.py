"""Reaching a Redis: the one place where a URL and the settings become connections.

Every connection, synchronous or of an event loop, of kombu, Celery or our own, is of a class below.
Behind Sentinel it asks for the primary each time that it connects. Everywhere it is given up when its
server turns out to be a replica, so that the next one leads to the primary: a managed Redis moves a
name to another server, Sentinel its answer. What is wrong with TLS is said with the setting to correct.
"""

from __future__ import annotations

import asyncio
import re
import ssl
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

import redis
import redis.asyncio
import redis.asyncio.connection as of_loop
from redis.asyncio.retry import Retry as LoopRetry
from redis.backoff import NoBackoff
from redis.connection import parse_url
from redis.retry import Retry

from broker_config.redis_errors import NotPrimaryError, unwrapped
from broker_config.settings import BrokerSettings
from broker_config.urls import redis_address
from nekro_agent.errors import SettingsError

__all__ = ["RedisEndpoint"]

#: What OpenSSL says of a certificate for another host name, or another IP address.
_OTHER_NAME: Final = frozenset({62, 64})
_FAILED: Final = (redis.ConnectionError, redis.TimeoutError)
#: How redis-py says that the server hung up before it answered once.
_CLOSED: Final = re.compile(r"closed by server|[Cc]onnection reset|Broken pipe|while (reading|writing)")


class RedisEndpoint:
    """One Redis as the settings describe it: a server, or the primary that Sentinels know."""

    def __init__(self, broker: BrokerSettings, url: str | None) -> None:
        """Read the settings; nothing is connected.

        Args:
            url: the broker's or the results'; TLS files, Sentinel's settings and time limits are
                the broker's for both.

        Raises:
            SettingsError: the URL is not one of a Redis, or a TLS file cannot be used.
        """
        assert url is not None  # noqa: S101 - settings were checked when the app was built
        address = redis_address(url)
        self._broker = broker
        self._server: dict[str, Any] = parse_url(address.server_url)  # type: ignore[no-untyped-call]
        kind = self._server.pop("connection_class", redis.Connection)
        self.is_encrypted = kind is redis.SSLConnection
        self._is_socket = kind is redis.UnixDomainSocketConnection
        if self.is_encrypted:
            self._server = {**_tls_parameters(broker), **self._server}
        self._sentinels = _Sentinels(broker, address.sentinels, self.tls) if address.sentinels else None

    @property
    def tls(self) -> dict[str, Any]:
        """Parameters of TLS, in the words of redis-py, kombu and Celery; empty without TLS."""
        return {name: value for name, value in self._server.items() if name.startswith("ssl_")}

    @property
    def sentinel_options(self) -> dict[str, Any]:
        """Transport options by which Flower and kombu's own transport find the primary; empty without."""
        if self._sentinels is None:
            return {}
        return {"master_name": self._sentinels.master, "sentinel_kwargs": self._sentinels.parameters}

    @property
    def connection_class(self) -> type[redis.connection.AbstractConnection]:
        """Class of a synchronous connection."""
        if self._is_socket:
            return _SocketConnection
        return _TLSConnection if self.is_encrypted else _TCPConnection

    def parameters(self, *, reply_seconds: float | None = None) -> dict[str, Any]:
        """Parameters of ``connection_class``, for a pool of redis-py.

        Args:
            reply_seconds: longest exchange; None: the broker's limit.
        """
        known = self._server if self._sentinels is None else self._server | {"sentinels": self._sentinels}
        return {
            "socket_timeout": reply_seconds or self._broker.socket_timeout_seconds,
            "socket_connect_timeout": self._broker.connect_timeout_seconds,
            **known,
        }

    def client(self, *, reply_seconds: float | None = None) -> redis.Redis:
        """A synchronous client; every exchange is tried once. See ``parameters``."""
        pool = redis.ConnectionPool(
            connection_class=self.connection_class,
            retry=Retry(NoBackoff(), 0),
            **self.parameters(reply_seconds=reply_seconds),
        )
        return redis.Redis.from_pool(pool)

    def loop_pool(self) -> redis.asyncio.ConnectionPool:
        """A pool that makes connections of the running loop; every exchange is tried once."""
        if self._is_socket:
            kind: Any = _LoopSocketConnection
        else:
            kind = _LoopTLSConnection if self.is_encrypted else _LoopTCPConnection
        return redis.asyncio.ConnectionPool(
            connection_class=kind, retry=LoopRetry(NoBackoff(), 0), protocol=2, **self.parameters()
        )


class _Sentinels:
    """Knows by asking where the primary is; used by any thread."""

    def __init__(
        self, broker: BrokerSettings, addresses: tuple[tuple[str, int], ...], tls: Mapping[str, Any]
    ) -> None:
        self.master, self._addresses = broker.sentinel_master, addresses
        password = broker.sentinel_password
        #: Of a connection to a Sentinel.
        self.parameters: dict[str, Any] = {
            "socket_timeout": broker.connect_timeout_seconds,
            "socket_connect_timeout": broker.connect_timeout_seconds,
            **({"username": broker.sentinel_username} if broker.sentinel_username else {}),
            **({"password": password.get_secret_value()} if password is not None else {}),
            **({"ssl": True, **tls} if tls else {}),
        }

    def primary(self) -> tuple[str, int]:
        """Ask one Sentinel after the other for the primary's address; blocks.

        Raises:
            redis.ConnectionError: none of them knows a primary that it can reach.
        """
        refusals = []
        for address in self._addresses:
            try:
                found = self._ask(address)
            except redis.AuthenticationError as exc:
                refusals.append(f"{address[0]}:{address[1]}: {exc} (NEKRO_BROKER__SENTINEL_PASSWORD)")
                continue
            except (redis.RedisError, OSError) as exc:
                refusals.append(f"{address[0]}:{address[1]}: {exc}")
                continue
            # The one that answered is asked first the next time: a dead host costs a time limit.
            self._addresses = (address, *(other for other in self._addresses if other != address))
            return found
        raise redis.ConnectionError(
            f"no Sentinel knows a primary {self.master!r} (NEKRO_BROKER__SENTINEL_MASTER): "
            + "; ".join(refusals)
        )

    @property
    def _tls(self) -> bool:
        return "ssl" in self.parameters

    def _ask(self, address: tuple[str, int]) -> tuple[str, int]:
        parameters = {name: value for name, value in self.parameters.items() if name != "ssl"}
        pool = redis.ConnectionPool(
            connection_class=_TLSConnection if self._tls else _TCPConnection,
            host=address[0], port=address[1], retry=Retry(NoBackoff(), 0), **parameters,
        )  # fmt: skip
        with redis.Redis.from_pool(pool) as client:
            state: Any = client.sentinel_master(self.master)
        if state["is_sdown"] or state["is_odown"] or not state["is_master"]:
            raise redis.ConnectionError("the primary is down and no other was promoted yet")
        return str(state["ip"]), int(state["port"])


class _Connection:
    """What a synchronous connection does besides redis-py's own."""

    def __init__(self, *, sentinels: _Sentinels | None = None, **parameters: Any) -> None:
        self._sentinels = sentinels
        super().__init__(**parameters)

    def _connect(self) -> Any:
        if self._sentinels is not None:
            self.host, self.port = self._sentinels.primary()
        return super()._connect()  # type: ignore[misc]

    def connect_check_health(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().connect_check_health(*args, **kwargs)  # type: ignore[misc]
        except _FAILED as exc:
            advice = _advice(exc, isinstance(self, redis.SSLConnection))
            if not advice:
                raise
            raise redis.ConnectionError(f"{str(exc).removesuffix('.')}. {advice}") from exc

    def read_response(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().read_response(*args, **kwargs)  # type: ignore[misc]
        except redis.ResponseError as exc:
            error = unwrapped(exc)
            if isinstance(error, NotPrimaryError):
                self.disconnect()  # type: ignore[attr-defined]
            if error is exc:
                raise
            raise error from exc


class _TCPConnection(_Connection, redis.Connection):
    pass


class _TLSConnection(_Connection, redis.SSLConnection):
    pass


class _SocketConnection(_Connection, redis.UnixDomainSocketConnection):
    pass


class _LoopConnection:
    """The same on an event loop; ``broker_config.redis_link`` reads the replies."""

    def __init__(self, *, sentinels: _Sentinels | None = None, **parameters: Any) -> None:
        self._sentinels = sentinels
        super().__init__(**parameters)

    async def _connect(self) -> None:
        if self._sentinels is not None:
            self.host, self.port = await asyncio.to_thread(self._sentinels.primary)
        await super()._connect()  # type: ignore[misc]

    async def send_packed_command(self, *args: Any, **kwargs: Any) -> None:
        try:
            await super().send_packed_command(*args, **kwargs)  # type: ignore[misc]
        except RuntimeError as exc:  # uvloop, when the server reset the connection a moment before
            raise redis.ConnectionError(f"the connection to Redis broke: {exc}") from exc

    async def connect_check_health(self, *args: Any, **kwargs: Any) -> None:
        try:
            await super().connect_check_health(*args, **kwargs)  # type: ignore[misc]
        except _FAILED as exc:
            advice = _advice(exc, isinstance(self, of_loop.SSLConnection))
            if not advice:
                raise
            raise redis.ConnectionError(f"{str(exc).removesuffix('.')}. {advice}") from exc


class _LoopTCPConnection(_LoopConnection, of_loop.Connection):
    pass


class _LoopTLSConnection(_LoopConnection, of_loop.SSLConnection):
    pass


class _LoopSocketConnection(_LoopConnection, of_loop.UnixDomainSocketConnection):
    pass


def _tls_parameters(broker: BrokerSettings) -> dict[str, Any]:
    """Settings of TLS as redis-py names them; the files were tried.

    Raises:
        SettingsError: a file is missing or holds something else.
    """
    ca, certificate, key = broker.tls_ca_file, broker.tls_cert_file, broker.tls_key_file
    context = ssl.create_default_context()
    if key is not None and certificate is None:
        raise SettingsError("NEKRO_BROKER__TLS_KEY_FILE is set; set NEKRO_BROKER__TLS_CERT_FILE as well")
    if ca is not None:
        _tried("NEKRO_BROKER__TLS_CA_FILE", ca, partial(context.load_verify_locations, ca))
    if certificate is not None:
        _tried("NEKRO_BROKER__TLS_CERT_FILE", certificate, partial(context.load_cert_chain, certificate, key))
    files = {"ssl_ca_certs": ca, "ssl_certfile": certificate, "ssl_keyfile": key}
    return {
        "ssl_cert_reqs": "required",
        "ssl_check_hostname": broker.tls_check_hostname,
        **{name: str(path) for name, path in files.items() if path is not None},
    }


def _tried(variable: str, path: Path, load: Callable[[], None]) -> None:
    try:
        load()
    except (OSError, ssl.SSLError) as exc:  # an SSLError is an OSError; both names are for the reader
        reason = "it does not fit (PEM file, and its key)" if isinstance(exc, ssl.SSLError) else exc.strerror
        raise SettingsError(f"{variable}: cannot use {path}: {reason}") from exc


def _advice(error: Exception, is_encrypted: bool) -> str:
    """Which setting to correct if TLS is why a connection failed; "" if it is not."""
    if isinstance(error, NotPrimaryError | redis.AuthenticationError):
        return ""
    no_tls = "The server may speak no TLS on this port: then write redis:// (sentinel://) in the URL"
    if isinstance(error, redis.TimeoutError):
        return no_tls if is_encrypted else ""
    fault: BaseException | None = error.__context__
    while fault is not None and not isinstance(fault, ssl.SSLError):
        fault = fault.__cause__ or fault.__context__
    if isinstance(fault, ssl.SSLCertVerificationError):
        if fault.verify_code in _OTHER_NAME:
            return (
                "The server's certificate is for other names: connect by one of them, or set "
                "NEKRO_BROKER__TLS_CHECK_HOSTNAME=false"
            )
        return (
            "The server's certificate is of no CA that is trusted here: set NEKRO_BROKER__TLS_CA_FILE to "
            "the certificate of its CA"
        )
    hung_up = _CLOSED.search(str(error)) is not None
    if is_encrypted and (hung_up or (isinstance(fault, ssl.SSLError) and "ALERT" in (fault.reason or ""))):
        # TLS 1.3 ends the handshake before the server has seen the client's certificate.
        return (
            "The server may refuse this client's certificate, or want one: set NEKRO_BROKER__TLS_CERT_FILE "
            "and NEKRO_BROKER__TLS_KEY_FILE to one of a CA that it trusts"
        )
    if isinstance(fault, ssl.SSLError):
        return no_tls
    if not is_encrypted and hung_up:
        return "If it accepts only TLS on this port, write rediss:// (sentinels://) in the URL"
    return ""
