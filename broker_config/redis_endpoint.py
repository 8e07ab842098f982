"""Creates connections to Redis from a URL and the settings; no other module does.

Every connection, synchronous or asyncio, of kombu, Celery or our own code, uses a class of this module.
Behind Sentinel it queries the primary at each connect. Any connection is closed when its server turns out
to be a replica or was replaced (``broker_config.primaries``), so that the next one reaches the primary:
after a failover, a managed Redis moves its host name to another server, and Sentinel returns another
address. TLS errors name the setting to correct.
"""

from __future__ import annotations

from broker_config.redis_library import redis

# isort: split

import asyncio
import re
import ssl
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

import redis.asyncio
import redis.asyncio.connection as of_loop
from redis.asyncio.retry import Retry as LoopRetry
from redis.backoff import NoBackoff
from redis.connection import parse_url
from redis.retry import Retry

from broker_config.primaries import Address, NotPrimaryError, Primary, Sentinels, unwrapped
from broker_config.settings import BrokerSettings
from broker_config.urls import redis_address
from nekro_agent.errors import SettingsError

__all__ = ["RedisEndpoint", "info_of_reply", "server_version"]

#: OpenSSL's verify codes for a certificate with another host name or IP address.
_OTHER_NAME: Final = frozenset({62, 64})
_FAILED: Final = (redis.ConnectionError, redis.TimeoutError)
#: redis-py's messages for a connection that the server closed before its first reply.
_CLOSED: Final = re.compile(r"closed by server|[Cc]onnection reset|Broken pipe|while (reading|writing)")


class RedisEndpoint:
    """One Redis as the settings describe it: a server, or the primary behind Sentinels."""

    def __init__(self, broker: BrokerSettings, url: str | None) -> None:
        """Read the settings without connecting.

        Args:
            url: URL of the broker or the results; both use the broker's TLS files, Sentinel settings
                and time limits.

        Raises:
            SettingsError: the URL is not a Redis URL, or a TLS file cannot be used.
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
        self._has_sentinels = bool(address.sentinels)
        #: What this process knows about the server that the connections should reach.
        self.primary = Primary.of((url, broker), lambda: self._sentinels(address.sentinels))

    @property
    def tls(self) -> dict[str, Any]:
        """TLS parameters as redis-py, kombu and Celery name them; empty without TLS."""
        return {name: value for name, value in self._server.items() if name.startswith("ssl_")}

    @property
    def sentinel_options(self) -> dict[str, Any]:
        """Transport options that tell Flower and kombu's own transport the primary; empty if unused."""
        if not self._has_sentinels:
            return {}
        return {"master_name": self._broker.sentinel_master, "sentinel_kwargs": self._sentinel_parameters}

    @property
    def connection_class(self) -> type[redis.connection.AbstractConnection]:
        """Class of synchronous connections."""
        if self._is_socket:
            return _SocketConnection
        return _TLSConnection if self.is_encrypted else _TCPConnection

    def parameters(self, *, reply_seconds: float | None = None) -> dict[str, Any]:
        """Return parameters of ``connection_class`` for a pool of redis-py.

        Args:
            reply_seconds: time limit of one request; None means the broker's limit.
        """
        return {
            "primary": self.primary,
            "socket_timeout": reply_seconds or self._broker.socket_timeout_seconds,
            "socket_connect_timeout": self._broker.connect_seconds,
            **self._server,
        }

    def client(self, *, reply_seconds: float | None = None) -> redis.Redis:
        """Return a synchronous client without retries. See ``parameters``."""
        pool = redis.ConnectionPool(
            connection_class=self.connection_class,
            retry=Retry(NoBackoff(), 0),
            **self.parameters(reply_seconds=reply_seconds),
        )
        return _client(pool)

    @property
    def _sentinel_parameters(self) -> dict[str, Any]:
        """Parameters of connections to a Sentinel."""
        seconds, password = self._broker.connect_seconds, self._broker.sentinel_password
        return {
            "socket_timeout": seconds,
            "socket_connect_timeout": seconds,
            **({"password": password.get_secret_value()} if password is not None else {}),
            **({"ssl": True, **self.tls} if self.tls else {}),
        }

    def _sentinels(self, addresses: tuple[Address, ...]) -> Sentinels | None:
        if not addresses:
            return None
        parameters = {name: value for name, value in self._sentinel_parameters.items() if name != "ssl"}
        kind = _TLSConnection if self.tls else _TCPConnection

        def connect(address: Address) -> redis.Redis:
            pool = redis.ConnectionPool(
                connection_class=kind, host=address[0], port=address[1], retry=Retry(NoBackoff(), 0),
                **parameters,
            )  # fmt: skip
            return _client(pool)

        return Sentinels(self._broker.sentinel_master, addresses, connect)

    def loop_pool(self) -> redis.asyncio.ConnectionPool:
        """Return a pool of asyncio connections without retries."""
        if self._is_socket:
            kind: Any = _LoopSocketConnection
        else:
            kind = _LoopTLSConnection if self.is_encrypted else _LoopTCPConnection
        return redis.asyncio.ConnectionPool(
            connection_class=kind, retry=LoopRetry(NoBackoff(), 0), protocol=2, **self.parameters()
        )


def _client(pool: redis.ConnectionPool) -> redis.Redis:
    """Return a client whose connections end with it.

    A garbage collector that finds a client in a cycle would end its sockets before what closes them. It does
    not find them while this refers to their pool.
    """
    client = redis.Redis.from_pool(pool)
    weakref.finalize(client, pool.disconnect).atexit = False
    return client


class _Connection:
    """Mixin of synchronous connections: Sentinel lookup, TLS advice, detection of replaced servers."""

    def __init__(self, *, primary: Primary | None = None, **parameters: Any) -> None:
        self._primary = primary
        self._term = 0
        super().__init__(**parameters)

    def _connect(self) -> Any:
        if self._primary is not None and self._primary.sentinels is not None:
            self.host, self.port = self._primary.sentinels.primary()
        return super()._connect()  # type: ignore[misc]

    def connect_check_health(self, *args: Any, **kwargs: Any) -> Any:
        # A pool calls this for each connection that it hands out.
        if self._is_replaced():
            self.disconnect()  # type: ignore[attr-defined]
        if self.is_connected:  # type: ignore[attr-defined]
            return
        self._term = 0 if self._primary is None else self._primary.term
        try:
            super().connect_check_health(*args, **kwargs)  # type: ignore[misc]
        except _FAILED as exc:
            advice = _advice(exc, isinstance(self, redis.SSLConnection))
            if not advice:
                raise
            raise redis.ConnectionError(f"{str(exc).removesuffix('.')}. {advice}") from exc
        if self._primary is not None:
            self._identify(self._primary)

    def send_packed_command(self, *args: Any, **kwargs: Any) -> None:
        if (
            self._is_replaced()
        ):  # it was not taken from a pool, so its owner must learn that it is another one
            self.disconnect()  # type: ignore[attr-defined]
            raise redis.ConnectionError("another server is the primary")
        super().send_packed_command(*args, **kwargs)  # type: ignore[misc]

    def read_response(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().read_response(*args, **kwargs)  # type: ignore[misc]
        except redis.ResponseError as exc:
            error = unwrapped(exc)
            if isinstance(error, NotPrimaryError):
                self.disconnect()  # type: ignore[attr-defined]
                if self._primary is not None:
                    self._primary.left(self._term)
            if error is exc:
                raise
            raise error from exc

    def _is_replaced(self) -> bool:
        primary = self._primary
        return primary is not None and primary.term != self._term and self.is_connected  # type: ignore[attr-defined]

    def _identify(self, primary: Primary) -> None:
        try:
            self.send_command("INFO", check_health=False)  # type: ignore[attr-defined]
            info = info_of_reply(self.read_response(disable_decoding=True))
        except redis.ResponseError:  # an ACL may deny it
            info = {}
        except BaseException:
            self.disconnect()  # type: ignore[attr-defined]
            raise
        try:
            self._term = primary.met(info, self._term)
        except NotPrimaryError:
            self.disconnect()  # type: ignore[attr-defined]
            raise


class _TCPConnection(_Connection, redis.Connection):
    pass


class _TLSConnection(_Connection, redis.SSLConnection):
    pass


class _SocketConnection(_Connection, redis.UnixDomainSocketConnection):
    pass


class _LoopConnection:
    """The same mixin for asyncio connections; ``nekro.broker.redis.link`` reads the replies."""

    def __init__(self, *, primary: Primary | None = None, **parameters: Any) -> None:
        self._primary = primary
        super().__init__(**parameters)

    async def _connect(self) -> None:
        if self._primary is not None and self._primary.sentinels is not None:
            self.host, self.port = await asyncio.to_thread(self._primary.sentinels.primary)
        await super()._connect()  # type: ignore[misc]

    async def send_packed_command(self, *args: Any, **kwargs: Any) -> None:
        try:
            await super().send_packed_command(*args, **kwargs)  # type: ignore[misc]
        except RuntimeError as exc:  # raised by uvloop if the server has just reset the connection
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


def server_version(info: Mapping[str, Any]) -> str:
    """Return name and version of the server that answered INFO: "Redis 7.0.15", "Valkey 9.1.2".

    Valkey's ``redis_version`` names a Redis that it is compatible with.
    """
    if info.get("server_name") == "valkey":
        return f"Valkey {info['valkey_version']}"
    return f"Redis {info['redis_version']}"


def info_of_reply(reply: bytes) -> dict[str, str]:
    """Return the fields of a reply of ``INFO``."""
    lines = [line.split(":", 1) for line in reply.decode(errors="replace").split("\r\n") if ":" in line]
    return {name: value for name, value in lines}


def _tls_parameters(broker: BrokerSettings) -> dict[str, Any]:
    """Return the TLS settings as redis-py names them, after loading the files once.

    Raises:
        SettingsError: a file is missing or has invalid content.
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
    except (OSError, ssl.SSLError) as exc:  # SSLError is an OSError; named for clarity
        reason = (
            "it is not a PEM file, or the key does not match"
            if isinstance(exc, ssl.SSLError)
            else exc.strerror
        )
        raise SettingsError(f"{variable}: cannot use {path}: {reason}") from exc


def _advice(error: Exception, is_encrypted: bool) -> str:
    """Return which setting to correct if TLS caused a failed connection; "" if it did not."""
    if isinstance(error, NotPrimaryError | redis.AuthenticationError):
        return ""
    no_tls = "The server may not use TLS on this port: then write redis:// (sentinel://) in the URL"
    if isinstance(error, redis.TimeoutError):
        return no_tls if is_encrypted else ""
    fault: BaseException | None = error.__context__
    while fault is not None and not isinstance(fault, ssl.SSLError):
        fault = fault.__cause__ or fault.__context__
    if isinstance(fault, ssl.SSLCertVerificationError):
        if fault.verify_code in _OTHER_NAME:
            return (
                "The server's certificate is for other host names: use one of them in the URL, or set "
                "NEKRO_BROKER__TLS_CHECK_HOSTNAME=false"
            )
        return (
            "The server's certificate is not from a trusted CA: set NEKRO_BROKER__TLS_CA_FILE to "
            "the certificate of its CA"
        )
    hung_up = _CLOSED.search(str(error)) is not None
    if is_encrypted and (hung_up or (isinstance(fault, ssl.SSLError) and "ALERT" in (fault.reason or ""))):
        # In TLS 1.3 the client finishes the handshake before the server verifies the client's certificate.
        return (
            "The server may require a client certificate, or refuse this one: set "
            "NEKRO_BROKER__TLS_CERT_FILE and NEKRO_BROKER__TLS_KEY_FILE to one of a CA that it trusts"
        )
    if isinstance(fault, ssl.SSLError):
        return no_tls
    if not is_encrypted and hung_up:
        return "If the server accepts only TLS on this port, write rediss:// (sentinels://) in the URL"
    return ""
