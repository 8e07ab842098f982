"""Logs of a worker: Celery's, the drivers' and our own go to one sink, without secrets or arguments."""

from __future__ import annotations

import logging
from typing import Final

from celery import signals

from broker_config.embedded import resolve_signing_key
from broker_config.redaction import Redactor
from broker_config.settings import Settings
from nekro_agent.core.logger import StandardLogs, configure

__all__ = ["configure_logs"]

#: Said once per call by Celery; ``workers.observation`` says it with chat and round, and without the
#: returned value. Below warning these two also write down arguments.
_SAID_BETTER: Final = ("celery.worker.strategy", "celery.app.trace")
#: Drivers that tell every statement, request and poll at DEBUG or INFO.
_TALKATIVE: Final = ("aiosqlite", "amqp", "asyncio", "httpcore", "httpx", "openai", "sqlalchemy", "kombu")


def configure_logs(settings: Settings, *, lane: str, worker: str) -> None:
    """Send every record of this process to standard error, as ``settings.log`` says.

    Celery finds logging configured and leaves it alone.
    """
    key = resolve_signing_key(settings).get_secret_value()
    configure(
        level=settings.log.level,
        json_lines=settings.log.json_lines,
        fields={"lane": lane, "worker": worker},
        redact=Redactor((*settings.secret_values(), key)),
    )
    logging.basicConfig(handlers=[StandardLogs()], level=settings.log.level, force=True)
    for name in (*_SAID_BETTER, *_TALKATIVE):
        logging.getLogger(name).setLevel(logging.WARNING)
    signals.setup_logging.connect(_is_set_up, weak=False)


def _is_set_up(**_: object) -> None:
    """Celery sets logging up itself unless somebody listens to this signal."""
