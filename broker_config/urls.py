"""Converts the URLs of brokers and results to the forms of redis-py, kombu and Celery.

Redis on a Unix socket is ``redis+socket:///path?virtual_host=0`` for kombu and Celery and
``unix:///path?db=0`` for redis-py; settings accept both. A Redis behind Sentinel is a list,
``sentinel://[user:password@]host:26379;sentinel://host2:26379/0``, in which at least one URL contains
the server's database and credentials; ``sentinels://`` is the same over TLS. Other URLs are not changed.
It also says which URLs name a place for files.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final
from urllib.parse import SplitResult, parse_qsl, quote, unquote, urlencode, urlsplit

from nekro_agent.errors import SettingsError

__all__ = [
    "AMQP_SCHEMES",
    "BUCKET_SCHEMES",
    "DRAINED",
    "LIVE_FILES",
    "REDIS_SCHEMES",
    "SOCKET_SCHEMES",
    "RedisAddress",
    "files_place",
    "is_drained",
    "is_redis",
    "kombu_url",
    "passwords_of",
    "redis_address",
    "server_name",
    "without_drain",
    "without_password",
]

REDIS_SCHEMES: Final = frozenset({"redis", "rediss", "unix", "redis+socket", "sentinel", "sentinels"})
#: Schemes of RabbitMQ, by kombu's names.
AMQP_SCHEMES: Final = frozenset({"amqp", "amqps", "pyamqp"})
SOCKET_SCHEMES: Final = frozenset({"unix", "redis+socket"})
#: Schemes of buckets, by the names of ``obstore``.
BUCKET_SCHEMES: Final = ("s3", "gs", "az")
#: The URL of files that are no objects of a store: live directories below the data directory.
LIVE_FILES: Final = "file://"
#: Characters before a bucket that belong to credentials.
_CREDENTIALS: Final = frozenset("@:")
SENTINEL_SCHEMES: Final = frozenset({"sentinel", "sentinels"})
SENTINEL_PORT: Final = 26379
#: End of the URL of a partition from which workers take what is left, while nothing new is sent to it.
DRAINED: Final = "#drain"
#: Separator of the URLs in a list; a semicolon in a password is not one.
_SEPARATOR: Final = re.compile(r";(?=[a-z][a-z0-9+.\-]*://)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class RedisAddress:
    """Address of a Redis."""

    #: URL for redis-py: ``redis://``, ``rediss://`` or ``unix://``; without host and port behind Sentinel.
    server_url: str
    #: Host and port of each Sentinel; empty without Sentinels.
    sentinels: tuple[tuple[str, int], ...] = ()


def is_redis(url: str) -> bool:
    """Whether the URL names a Redis server (over TCP, TLS, a Unix socket or Sentinel)."""
    return urlsplit(url).scheme in REDIS_SCHEMES


def redis_address(url: str) -> RedisAddress:
    """Parse the URL of a Redis.

    Raises:
        SettingsError: it is not a Redis URL, or the URLs of a Sentinel list contradict each other.
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


def kombu_url(url: str) -> str:
    """Convert a broker URL for kombu; URLs of brokers other than Redis are returned unchanged."""
    if urlsplit(url).scheme not in SENTINEL_SCHEMES:
        return _respell(url, scheme="redis+socket", database_field="virtual_host")
    address = redis_address(url)
    server = urlsplit(address.server_url)
    # kombu has no ``sentinels`` scheme: TLS is set by options. Any URL of the list may be the first for it.
    return ";".join(
        f"sentinel://{server.netloc}{f'[{host}]' if ':' in host else host}:{port}{server.path}"
        for host, port in address.sentinels
    )


def without_password(url: str) -> str:
    """Return the URL or list of URLs with each password masked, for logs and errors."""
    return ";".join(map(_masked, _SEPARATOR.split(url)))


def is_drained(url: str) -> bool:
    """Whether the URL of a partition says that nothing new is sent to it."""
    return url.endswith(DRAINED)


def without_drain(url: str) -> str:
    """Return the URL of the server of a partition."""
    return url.removesuffix(DRAINED)


def server_name(url: str) -> str:
    """Return the URL of a server without user and password, which may change while the server stays."""
    parts = map(urlsplit, _SEPARATOR.split(without_drain(url)))
    return ";".join(part._replace(netloc=part.netloc.rpartition("@")[2]).geturl() for part in parts)


def files_place(url: str) -> SplitResult:
    """Return the parts of the URL of files: scheme, bucket and prefix, or the path of a directory.

    Raises:
        SettingsError: it names no place, or it has credentials or options, which the error does not show.
    """
    known = ", ".join(f"{scheme}://bucket/prefix" for scheme in BUCKET_SCHEMES)
    try:
        parts = urlsplit(url)
    except ValueError:  # of brackets, which are for addresses
        raise SettingsError(
            f"the URL of files is no URL; it must be {LIVE_FILES}, file:///directory, {known}"
        ) from None
    if parts.scheme not in ("file", *BUCKET_SCHEMES):
        fault = f"{parts.scheme}:// is no place for files" if parts.scheme else "the URL has no scheme"
        raise SettingsError(f"{fault}; it must be {LIVE_FILES}, file:///directory, {known}")
    # Names of buckets contain no colon; a secret may contain a slash, after which it would be a prefix.
    if not _CREDENTIALS.isdisjoint(parts.netloc) or parts.query or parts.fragment:
        place = f"{parts.netloc.rpartition('@')[2]}{parts.path}"
        shown = place if _CREDENTIALS.isdisjoint(place) else "…"
        raise SettingsError(
            f"the URL of files, {parts.scheme}://{shown}, has more than a place; set credentials, region and "
            "endpoint by the variables of the provider, such as AWS_ACCESS_KEY_ID and AWS_ENDPOINT_URL"
        )
    if not url.isprintable() or url != url.strip() or "\0" in unquote(url):
        raise SettingsError(f"{url!a} has characters that no place has; remove spaces and control characters")
    if parts.scheme == "file" and url != LIVE_FILES and not _is_directory(parts):
        raise SettingsError(f"{url} names no directory; it must be {LIVE_FILES}, or file:///directory")
    if parts.scheme != "file" and (not parts.netloc or "//" in parts.path):
        lacks = "no bucket" if not parts.netloc else "a prefix with an empty name"
        raise SettingsError(f"{url} names {lacks}; it must be {parts.scheme}://bucket/prefix")
    return parts


def _is_directory(parts: SplitResult) -> bool:
    return not parts.netloc and parts.path.startswith("/") and bool(parts.path.strip("/"))


def passwords_of(url: str) -> list[str]:
    """Return the passwords in a URL or list of URLs, as plain text."""
    found = (urlsplit(one).password for one in _SEPARATOR.split(url))
    return [unquote(password) for password in found if password]


def _masked(url: str) -> str:
    parts = urlsplit(url)
    if parts.password is None:
        return url
    user, host = parts.username or "", parts.netloc.rpartition("@")[2]
    return parts._replace(netloc=f"{user}:**@{host}").geturl()


def _agreed(url: str, values: set[str], *, what: str) -> str:
    """Return the single non-empty value; "" if there is none."""
    given = values - {""}
    if len(given) > 1:
        raise SettingsError(f"{without_password(url)}: its URLs have different {what}; all must be the same")
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
