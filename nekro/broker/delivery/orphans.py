"""The calls that a worker held when its process ended, for the parent of the process, which knows at once.

Elsewhere their leases expire, as it is unknown whether the worker lives. Only calls with a waiting caller
are handled: all other messages announce rows, which the sweep publishes again.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Final

from celery.app.task import Context

from broker_config.app import NekroApp
from broker_config.keys import is_caller_id
from broker_config.redis_library import redis
from broker_config.urls import without_password
from nekro.broker.delivery.transport import ClaimChannel, held_keys
from nekro_agent.errors import BrokerUnavailableError

__all__ = ["Orphan", "Orphans"]

_SCAN: Final = 500


@dataclass(frozen=True, kw_only=True)
class Orphan:
    """One call that a worker held."""

    tag: str
    call_id: str
    task: str
    reply_to: str


class Orphans:
    """The calls that one worker held; blocking. Every method may raise BrokerUnavailableError."""

    def __init__(self, app: NekroApp, holder: str) -> None:
        """Prepare; nothing is read yet.

        Args:
            app: of the worker's lane, on a Redis broker.
            holder: beginning of the tags of its deliveries.
        """
        self._app = app
        self._holder = holder

    def take(self, *, answer: Exception | None) -> list[Orphan]:
        """Answer the only call with an error, or requeue all; returns the calls that the worker held.

        Args:
            answer: what the caller gets if the worker held one call; None requeues it too, as one more
                delivery that no worker finished.
        """
        with ExitStack() as stack:
            held = []
            for app in self._app.servers:
                with _translated(app):
                    connection = stack.enter_context(app.connection_for_write())
                    channel = connection.default_channel
                    assert isinstance(channel, ClaimChannel)  # noqa: S101 - the broker is Redis
                    client = stack.enter_context(channel.conn_or_acquire())
                    held.append((app, client, channel, self._find(client, channel)))
            found = [orphan for *_, orphans in held for orphan in orphans]
            is_answered = answer is not None and len(found) == 1
            for app, client, channel, orphans in held:
                with _translated(app):
                    for orphan in orphans:
                        if is_answered and answer is not None:
                            self._answer(app, client, channel, orphan, answer)
                        else:
                            channel.qos.restore_by_tag(orphan.tag, client, is_lost=True)
        return found

    def _find(self, client: Any, channel: ClaimChannel) -> list[Orphan]:
        found, cursor = [], 0
        while True:
            # execute_command bypasses kombu's key prefix, so the keys include it.
            cursor, flat = client.execute_command(
                "HSCAN", held_keys(channel)[1], cursor, "MATCH", f"{self._holder}*", "COUNT", _SCAN
            )
            pairs = flat.items() if isinstance(flat, dict) else zip(flat[::2], flat[1::2], strict=True)
            found += [orphan for tag, raw in pairs if (orphan := _orphan(tag.decode(), raw)) is not None]
            if not int(cursor):
                return found

    def _answer(
        self, app: NekroApp, client: Any, channel: ClaimChannel, orphan: Orphan, error: Exception
    ) -> None:
        options = {"errbacks": None, "chord": None, "group": None}
        request = Context(id=orphan.call_id, task=orphan.task, reply_to=orphan.reply_to, **options)
        app.backend.mark_as_failure(orphan.call_id, error, request=request)
        channel.qos.forget(orphan.tag, client)


@contextmanager
def _translated(app: NekroApp) -> Iterator[None]:
    try:
        yield
    except (redis.RedisError, OSError) as exc:
        url = without_password(app.nekro_settings.broker.url or "")
        raise BrokerUnavailableError(f"broker {url} does not answer: {exc}") from exc


def _orphan(tag: str, raw: bytes) -> Orphan | None:
    try:
        message = json.loads(raw)[0]
        headers, reply_to = message["headers"], message["properties"].get("reply_to")
        call_id, task = headers["id"], headers["task"]
    except (ValueError, TypeError, KeyError, IndexError, RecursionError):
        return None  # not a message of ours; its lease expires
    if not is_caller_id(reply_to) or not isinstance(call_id, str) or not isinstance(task, str):
        return None
    return Orphan(tag=tag, call_id=call_id, task=task, reply_to=reply_to)
