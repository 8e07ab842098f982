"""Where workers answer probes, which worker it is, and the logs of a process.

Celery's logs, the drivers' and our own go to one sink, without secrets. The module imports little, because
probes are frequent."""

from __future__ import annotations

import hashlib
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Final

from nekro.broker.celery.names import CALL_LOGGERS
from nekro_agent.errors import ServiceError

if TYPE_CHECKING:
    from broker_config.settings import Settings

__all__ = [
    "broker_id",
    "configure_logs",
    "data_dir_id",
    "monitor_sockets",
    "socket_dir",
    "socket_path",
]


def data_dir_id(settings: Settings) -> str:
    """Return a name for a data directory that reveals no path: answers to probes may leave the host."""
    return _digest(str(settings.data_dir.expanduser().resolve()))


def broker_id(settings: Settings) -> str | None:
    """Return a name for a broker with its key prefix, without its password; None if no URL is set."""
    from broker_config.urls import without_password

    broker = settings.broker
    return None if broker.url is None else _digest(f"{broker.key_prefix} {without_password(broker.url)}")


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def socket_dir() -> Path:
    """Return the directory of the sockets, created if it is missing.

    Raises:
        ServiceError: other users may access it.
    """
    base = os.environ.get("XDG_RUNTIME_DIR") or "/tmp"  # noqa: S108 - a private directory below it
    directory = Path(base) / f"nekro-workers-{os.getuid()}"
    directory.mkdir(mode=0o700, exist_ok=True)
    found = directory.lstat()
    if found.st_uid != os.getuid() or found.st_mode & 0o077 or directory.is_symlink():
        raise ServiceError(f"{directory} is not private to this user; remove it, or set XDG_RUNTIME_DIR")
    return directory


def socket_path(lane: str, pid: int) -> Path:
    """Return the socket of one worker."""
    return socket_dir() / f"{lane}.{pid}.sock"


def monitor_sockets(lane: str | None = None) -> list[Path]:
    """Return the sockets of a lane's workers, or of all workers, including those of killed workers."""
    return sorted(socket_dir().glob(f"{lane or '*'}.*.sock"))


#: Drivers that log every statement, request and poll at DEBUG or INFO.
_TALKATIVE: Final = ("amqp", "asyncio", "httpcore", "httpx", "openai", "sqlalchemy", "kombu")


def configure_logs(settings: Settings, *, lane: str, worker: str) -> None:
    """Send every log record of this process to standard error, as ``settings.log`` says.

    Celery then finds logging configured and does not configure it.
    """
    # Imported here, because probes import this module.
    from celery import signals

    from broker_config.embedded import resolve_signing_key
    from nekro.base.redaction import Redactor
    from nekro_agent.core.logger import StandardLogs, configure

    key = resolve_signing_key(settings).get_secret_value()
    configure(
        level=settings.log.level,
        json_lines=settings.log.json_lines,
        fields={"lane": lane, "worker": worker},
        redact=Redactor((*settings.secret_values(), key)),
    )
    logging.basicConfig(handlers=[StandardLogs()], level=settings.log.level, force=True)
    # ``workers.pools.observation`` logs each call, with chat and round and without values.
    for name in (*CALL_LOGGERS, *_TALKATIVE):
        logging.getLogger(name).setLevel(logging.WARNING)
    signals.setup_logging.connect(_is_set_up, weak=False)


def _is_set_up(**_: object) -> None:
    """A receiver of this signal keeps Celery from configuring logging itself."""
