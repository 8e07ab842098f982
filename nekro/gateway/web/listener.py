"""The listening socket of a gateway; `nekro up` opens it and passes it on."""

from __future__ import annotations

import errno
import os
import socket
import stat
from contextlib import suppress
from pathlib import Path
from typing import Final

from broker_config.settings import GatewaySettings
from nekro_agent.errors import ServiceError

__all__ = ["listen", "listen_on_free_port", "url_of"]

_BACKLOG: Final = 1024
#: Ports to try, since several systems of one host may share a setting.
_PORTS: Final = 64


def listen(settings: GatewaySettings) -> socket.socket:
    """Open the socket that the settings name.

    Raises:
        ServiceError: the address is in use or is not one of this host.
    """
    if settings.socket is not None:
        return _listen_on_path(settings.socket)
    try:
        return _listen_on_port(settings.host, settings.port)
    except OSError as exc:
        where = f"{settings.host}:{settings.port}"
        raise ServiceError(
            f"cannot listen on {where}: {exc.strerror}; choose another with --host or --port"
        ) from exc


def listen_on_free_port(settings: GatewaySettings) -> socket.socket:
    """Open the port that the settings name, or the first free one after it.

    Raises:
        ServiceError: none of 64 ports is free, or the address is not one of this host.
    """
    for port in range(settings.port, min(settings.port + _PORTS, 65536)):
        try:
            return _listen_on_port(settings.host, port)
        except OSError as exc:
            if exc.errno != errno.EADDRINUSE:
                raise ServiceError(f"cannot listen on {settings.host}:{port}: {exc.strerror}") from exc
    raise ServiceError(
        f"port {settings.port} of {settings.host} and the {_PORTS - 1} after it are taken; choose another"
        " with --gateway-port, 0 serves no HTTP API"
    )


def url_of(listener: socket.socket) -> str:
    """Return the URL of a listening socket; a wildcard address is shown as this machine's."""
    if listener.family == socket.AF_UNIX:
        return f"unix:{listener.getsockname()}"
    host, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104 - compared, not bound
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _listen_on_port(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=_BACKLOG)


def _listen_on_path(path: Path) -> socket.socket:
    with suppress(FileNotFoundError):
        if stat.S_ISSOCK(path.stat().st_mode) and not _is_served(path):
            path.unlink()  # left by a gateway that was killed
    listener = socket.socket(socket.AF_UNIX)
    before = os.umask(0o177)
    try:
        listener.bind(str(path))
    except OSError as exc:
        listener.close()
        raise ServiceError(f"cannot listen on {path}: {exc.strerror or exc}") from exc
    finally:
        os.umask(before)
    listener.listen(_BACKLOG)
    return listener


def _is_served(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(str(path)) == 0
