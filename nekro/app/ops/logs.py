"""Configures a worker's logs: Celery's, the drivers' and our own go to one sink, without secrets."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from nekro.broker.celery.names import CALL_LOGGERS

if TYPE_CHECKING:
    from broker_config.settings import Settings

__all__ = ["configure_logs"]

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
