"""Remote control of workers, for holders of the signing key, and revocations that survive their restart.

Celery's commands are broadcasts that any client with write access to the broker can send. Here each one is
signed by the process that sends it (``nekro``, a worker, Flower started by ``nekro flower``), and a worker
drops unsigned ones. A signed command is accepted once, within ``FRESH_SECONDS`` of being sent, and only by
workers that were running when it was sent, so it cannot be replayed. Commands outside ``COMMANDS`` are
refused even if they are signed. Answers go only to the application's own reply exchange.

Only running workers receive Celery's ``revoke``. So the ids are also stored in Redis, and a worker reads
them each time it connects, before it consumes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any, Final
from uuid import uuid4

from celery import Celery, bootsteps
from celery.app.control import Control
from celery.utils.collections import LimitedSet
from kombu.pidbox import Mailbox, Node
from loguru import logger

from broker_config.embedded import resolve_signing_key
from broker_config.keys import Keys
from broker_config.redis_library import redis
from nekro.base.metrics import metrics
from nekro.broker.celery.names import MAILBOX_STEP
from nekro.broker.celery.worker import add_revoked
from nekro.wire.seals import CONTROL, Seal
from nekro_agent.shared_clock import elapsed_seconds, shared_now

__all__ = [
    "COMMANDS",
    "FRESH_SECONDS",
    "RevocationStep",
    "SignedControl",
    "SignedMailbox",
    "SignedNode",
    "name_request",
    "revoke",
    "revoke_request",
]

#: Commands that a worker executes. We use ``revoke``, ``ping`` and ``active_queues``; Flower uses the others.
COMMANDS: Final = frozenset(
    (
        "active",
        "active_queues",
        "add_consumer",
        "cancel_consumer",
        "conf",
        "ping",
        "pool_grow",
        "pool_shrink",
        "query_task",
        "rate_limit",
        "registered",
        "reserved",
        "revoke",
        "revoked",
        "scheduled",
        "stats",
        "time_limit",
    )
)
#: Maximum age of a command by the fleet's shared time; every nonce is remembered for twice as long.
FRESH_SECONDS: Final = 300.0
#: Maximum number of nonces kept for replay protection; beyond it the oldest are dropped.
MAX_REMEMBERED: Final = 20_000
#: Allowed fields of a broadcast.
_FIELDS: Final = ("method", "arguments", "destination", "pattern", "matcher", "ticket", "reply_to")

_PROOF: Final = "proof"


def _signed(body: Mapping[str, Any], nonce: str, sent_at: str) -> list[str]:
    covered = {name: body.get(name) for name in _FIELDS}
    return [json.dumps(covered, sort_keys=True, separators=(",", ":")), nonce, sent_at]


def _stats(state: Any, **_: Any) -> dict[str, Any]:
    """Celery's ``stats`` without the transport options, which contain objects and Sentinel passwords."""
    found: dict[str, Any] = state.consumer.controller.stats()
    found.get("broker", {}).pop("transport_options", None)
    return found


class SignedNode(Node):  # type: ignore[misc]
    """A worker's end: executes commands that are signed, recent, not repeated and in ``COMMANDS``."""

    handlers: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        known: dict[str, Any] = self.handlers or {}
        self.handlers = {name: known[name] for name in COMMANDS if name in known} | {"stats": _stats}
        self._seen = LimitedSet(maxlen=MAX_REMEMBERED, expires=2 * FRESH_SECONDS)
        self._began_at = elapsed_seconds()

    def handle_message(self, body: Any, message: Any = None) -> Any:
        """Execute a broadcast, or drop it; never raises because of a broadcast's content."""
        try:
            refusal = self._refusal(body)
        except Exception as exc:  # a body of unexpected shape
            refusal = type(exc).__name__
        if refusal is not None:
            metrics().messages_refused.labels("control").inc()
            logger.bind(reason=refusal).error("control_command_refused")
            return None
        command = {name: value for name, value in body.items() if name != _PROOF}
        # The message is not passed on, because its clock header is not signed.
        return super().handle_message(command)

    def on_decode_error(self, message: Any, exc: Exception) -> None:
        """Drop a broadcast that cannot be decoded, without logging its content."""
        metrics().messages_refused.labels("control").inc()
        logger.bind(reason=type(exc).__name__).error("control_command_refused")

    def _refusal(self, body: Any) -> str | None:
        """Return why a broadcast is refused; None when it is executed."""
        if not isinstance(body, dict) or not isinstance(body.get(_PROOF), dict):
            return "it is not signed"
        if not {*_FIELDS, _PROOF}.issuperset(body):
            return "it has unknown fields"
        proof = body[_PROOF]
        nonce, sent_at = proof.get("nonce"), proof.get("sent_at")
        if not isinstance(nonce, str) or not isinstance(sent_at, str):
            return "it is not signed"
        mailbox = self.mailbox
        if not mailbox.seal.fits(_signed(body, nonce, sent_at), proof.get("signature")):
            return "its signature does not match"
        age_seconds = shared_now() - float(sent_at)
        # Written so that an age that is not a number is refused.
        if not abs(age_seconds) <= FRESH_SECONDS:
            return "it was sent too long ago, or the clocks differ"
        if age_seconds > elapsed_seconds() - self._began_at:
            return "it was sent before this worker started listening"
        if nonce in self._seen:
            return "it was received before"
        self._seen.add(nonce)
        if body["method"] not in self.handlers:
            return f"{str(body['method'])[:64]!r} is not available"
        reply_to = body.get("reply_to")
        if reply_to is not None and reply_to["exchange"] != mailbox.reply_exchange.name:
            return "its reply exchange is not this application's"
        return None


class _SigningProducer:
    """A producer that signs the broadcasts it publishes."""

    def __init__(self, producer: Any, seal: Seal) -> None:
        self._producer, self._seal = producer, seal

    def publish(self, message: dict[str, Any], **options: Any) -> Any:
        """Sign and publish a broadcast."""
        nonce, sent_at = uuid4().hex, repr(shared_now())
        # Sign the decoded form, in which tuples are lists.
        plain = json.loads(json.dumps(message))
        signature = self._seal.sign(_signed(plain, nonce, sent_at))
        proof = {"nonce": nonce, "sent_at": sent_at, "signature": signature}
        return self._producer.publish({**plain, _PROOF: proof}, **options)


class SignedMailbox(Mailbox):  # type: ignore[misc]
    """The sender's end, and the base of both ends."""

    node_cls = SignedNode
    accept = ["json"]  # noqa: RUF012 - kombu's attribute
    #: Set by ``SignedControl``; copied with the mailbox to each connection.
    control: Any = None

    @property
    def seal(self) -> Seal:
        """Signs and verifies commands."""
        seal: Seal = self.control.seal
        return seal

    def _publish(self, *args: Any, producer: Any = None, channel: Any = None, **options: Any) -> Any:
        with self._signing(producer, channel) as signing:
            return super()._publish(*args, producer=signing, channel=channel, **options)

    @contextmanager
    def _signing(self, producer: Any, channel: Any) -> Iterator[_SigningProducer]:
        with self.producer_or_acquire(producer, channel or self.connection.default_channel) as used:
            yield _SigningProducer(used, self.seal)


class SignedControl(Control):  # type: ignore[misc]
    """``app.control`` with ``SignedMailbox``."""

    Mailbox = SignedMailbox

    def __init__(self, app: Any = None) -> None:
        super().__init__(app)
        self.mailbox.control = self

    @cached_property
    def seal(self) -> Seal:
        """Signs and verifies commands.

        Raises:
            SettingsError: the signing key cannot be read.
        """
        return Seal(resolve_signing_key(self.app.nekro_settings), purpose=CONTROL)


#: How long an id is kept: longer than any message exists.
REVOKED_SECONDS: Final = 24 * 3600
#: How long the call of a client's request is found.
REQUEST_SECONDS: Final = 3600
#: Maximum number of ids; as many as Celery itself keeps in a worker.
MAX_REVOKED: Final = 50_000


def revoke(app: Celery, task_ids: Sequence[str]) -> None:
    """Make running and future workers drop tasks or stop them; blocks.

    Raises:
        Exception: an error of the drivers, when Redis or the broker does not answer.
    """
    now = shared_now()
    with app.backend.client.pipeline(transaction=False) as pipe:
        key = _key(app)
        pipe.zadd(key, {task_id: now + REVOKED_SECONDS for task_id in task_ids})
        pipe.zremrangebyscore(key, 0, now)
        pipe.zremrangebyrank(key, 0, -MAX_REVOKED - 1)
        pipe.expire(key, REVOKED_SECONDS)
        pipe.execute()
    app.control.revoke(list(task_ids), terminate=True)


def name_request(app: Celery, digest: str, call_id: str) -> None:
    """Keep which call a client's request causes, so that any gateway can revoke it; blocks.

    The newest call counts: clients give several requests the same number.

    Raises:
        Exception: as from ``revoke``.
    """
    app.backend.client.set(_keys(app).request(digest), call_id, ex=REQUEST_SECONDS)


def revoke_request(app: Celery, digest: str) -> None:
    """Revoke the call that a request has caused; nothing if it caused none, or long ago; blocks.

    Raises:
        Exception: as from ``revoke``.
    """
    found = app.backend.client.get(_keys(app).request(digest))
    if found is not None:
        revoke(app, [found.decode(errors="replace")])


class RevocationStep(bootsteps.StartStopStep):  # type: ignore[misc]
    """Reads the ids at each connect, after the mailbox has started listening, so that none is missed."""

    requires = (MAILBOX_STEP,)

    def start(self, c: Any) -> None:
        """Load the ids that were revoked while this worker was not connected."""
        try:
            found = c.app.backend.client.zrangebyscore(
                _key(c.app), shared_now(), "+inf", start=0, num=MAX_REVOKED
            )
        except (redis.RedisError, OSError) as exc:
            # Broadcasts still work, and a call's deadline is checked anyway.
            logger.bind(error=str(exc)).warning("revoked_calls_not_read")
            return
        add_revoked(raw.decode(errors="replace") for raw in found)


def _key(app: Celery) -> str:
    return _keys(app).revoked


def _keys(app: Celery) -> Keys:
    return Keys(prefix=app.conf.result_backend_transport_options.get("global_keyprefix", ""))
