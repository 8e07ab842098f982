"""The URLs of brokers and results, in the spellings that their readers want.

Redis on a Unix socket is ``redis+socket:///path?virtual_host=0`` to kombu and Celery and
``unix:///path?db=0`` to redis-py; settings accept both. A Redis behind Sentinel is a list,
``sentinel://[user:password@]host:26379;sentinel://host2:26379/0``, of which one URL at least names
the database and the credentials of the server; ``sentinels://`` is the same over TLS. Everything else
is passed through.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final
from urllib.parse import SplitResult, parse_qsl, quote, unquote, urlencode, urlsplit

from nekro_agent.errors import SettingsError

__all__ = [
    "RedisAddress",
    "client_url",
    "is_redis",
    "kombu_url",
    "passwords_of",
    "redis_address",
    "without_password",
]

REDIS_SCHEMES: Final = frozenset({"redis", "rediss", "unix", "redis+socket", "sentinel", "sentinels"})
SOCKET_SCHEMES: Final = frozenset({"unix", "redis+socket"})
SENTINEL_SCHEMES: Final = frozenset({"sentinel", "sentinels"})
SENTINEL_PORT: Final = 26379
#: Between two URLs of a list; a password may contain a semicolon.
_SEPARATOR: Final = re.compile(r";(?=[a-z][a-z0-9+.\-]*://)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class RedisAddress:
    """Where a Redis is."""

    #: For redis-py: ``redis://``, ``rediss://`` or ``unix://``. Behind Sentinel host and port are missing.
    server_url: str
    #: Host and port of each Sentinel that knows the server; empty where there is none.
    sentinels: tuple[tuple[str, int], ...] = ()


def is_redis(url: str) -> bool:
    """Whether the URL names a Redis server (over TCP, TLS, a Unix socket or Sentinel)."""
    return urlsplit(url).scheme in REDIS_SCHEMES


def redis_address(url: str) -> RedisAddress:
    """Parse the URL of a Redis.

    Raises:
        SettingsError: it is not one, or a list of Sentinels contradicts itself.
    """
    if not is_redis(url):
        raise SettingsError(f"{without_password(url)} is not a Redis URL")
    if urlsplit(url).scheme not in SENTINEL_SCHEMES:
        return RedisAddress(_respell(url, scheme="unix", database_field="db"))
    parts = [urlsplit(one) for one in _SEPARATOR.split(url)]
    if len({part.scheme for part in parts}) > 1:
        raise SettingsError(f"{without_password(url)}: use one scheme for all Sentinels of the list")
    userinfo = _agreed(url, {part.netloc.rpartition("@")[0] for part in parts}, what="credentials")
    database = _agreed(url, {part.path.strip("/") for part in parts}, what="databases")
    scheme = "rediss" if parts[0].scheme == "sentinels" else "redis"
    server_url = f"{scheme}://{userinfo}{'@' if userinfo else ''}/{database}"
    return RedisAddress(server_url, tuple(_sentinel(part, url) for part in parts))


def client_url(url: str) -> str:
    """Spell the URL of one Redis server for redis-py.

    Raises:
        SettingsError: the URL is not one of a Redis server.
    """
    address = redis_address(url)
    if address.sentinels:
        raise SettingsError(f"{without_password(url)} names Sentinels, not a Redis server")
    return address.server_url


def kombu_url(url: str) -> str:
    """Spell a broker URL for kombu; other brokers than Redis are returned unchanged."""
    if urlsplit(url).scheme not in SENTINEL_SCHEMES:
        return _respell(url, scheme="redis+socket", database_field="virtual_host")
    address = redis_address(url)
    server = urlsplit(address.server_url)
    # kombu has no ``sentinels``: its TLS options say that. It takes any URL of the list for the first.
    return ";".join(
        f"sentinel://{server.netloc}{f'[{host}]' if ':' in host else host}:{port}{server.path}"
        for host, port in address.sentinels
    )


def without_password(url: str) -> str:
    """The URL, or list of URLs, with each password masked, for logs and errors."""
    return ";".join(map(_masked, _SEPARATOR.split(url)))


def passwords_of(url: str) -> list[str]:
    """The passwords in a URL or list of URLs, as plain text."""
    found = (urlsplit(one).password for one in _SEPARATOR.split(url))
    return [unquote(password) for password in found if password]


def _masked(url: str) -> str:
    parts = urlsplit(url)
    if parts.password is None:
        return url
    user, host = parts.username or "", parts.netloc.rpartition("@")[2]
    return parts._replace(netloc=f"{user}:**@{host}").geturl()


def _agreed(url: str, values: set[str], *, what: str) -> str:
    """The one value that is given; "" if none is."""
    given = values - {""}
    if len(given) > 1:
        raise SettingsError(f"{without_password(url)}: its URLs name different {what}; all must agree")
    return given.pop() if given else ""


def _sentinel(part: SplitResult, url: str) -> tuple[str, int]:
    try:
        host, port = part.hostname, part.port
    except ValueError as exc:
        raise SettingsError(f"{without_password(url)}: {exc}") from exc
    if not host:
        raise SettingsError(f"{without_password(url)}: each Sentinel needs a host")
    return host, port or SENTINEL_PORT


def _respell(url: str, *, scheme: str, database_field: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in SOCKET_SCHEMES:
        return url
    query = dict(parse_qsl(parts.query))
    database = query.pop("virtual_host", None) or query.pop("db", None)
    if database:
        query[database_field] = database
    tail = f"?{urlencode(query)}" if query else ""
    return f"{scheme}://{parts.netloc}{quote(parts.path, safe='/%')}{tail}"
