"""Dead letters: lists, verifies, retries and drops messages that are kept in the broker for an operator.

On Redis there are two lists: raw messages of calls that no worker finished, and refused messages with the
reason. On RabbitMQ there are two queues, ``nekro.dead`` and ``nekro.refused``. Everything with write access
to the broker can write there, so a message's signatures are verified again before it is retried.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, Final

from broker_config.app import NekroApp
from broker_config.keys import Keys
from broker_config.redis_endpoint import RedisEndpoint
from broker_config.redis_library import redis
from broker_config.topology import DRAIN_TASK, JOB_TASK
from broker_config.urls import is_redis
from nekro.broker.celery.tasks import admit, delivered_from
from nekro.broker.delivery.messages import CallMessage
from nekro.broker.delivery.transport import deliveries, uncompressed
from nekro.broker.publishing import encode_message, stored_body, unavailable
from nekro.wire import plain_json
from nekro.wire.invocation import Invocation, Signer
from nekro_agent.errors import MessageRefusedError, NotFoundError, UsageError

__all__ = ["DeadLetters", "DeadMessage", "DeadPosition", "VerifiedMessage"]

#: Messages that are read at a time; one may have megabytes.
_PAGE: Final = 50

#: Moves an entry to its queue, unless another operator has taken it meanwhile. KEYS: dead letters, queue
#: (lists). ARGV: the entry, the message to send. Returns 1, or 0 if the entry is gone.
SEND_AGAIN: Final = """
if redis.call('LREM', KEYS[1], 1, ARGV[1]) == 0 then return 0 end
redis.call('LPUSH', KEYS[2], ARGV[2])
return 1
"""

#: Prefix of generated ids, for messages without a readable id.
RAW_PREFIX: Final = "raw-"


@dataclass(frozen=True, kw_only=True)
class DeadMessage:
    """One stored message, not verified; its arguments are not shown."""

    #: The task id, which is the call id; generated from the content if it cannot be read.
    id: str
    #: Name of the task; None if the message cannot be read as a task.
    task: str | None
    #: Queue that it came from; None if unknown.
    lane: str | None
    #: Number of deliveries that were not finished.
    deliveries: int
    size_bytes: int
    #: The entry of the list.
    raw: bytes
    #: Why a worker refused it; None if it was not refused.
    refusal: str | None = None

    @property
    def reason(self) -> str:
        """Why the message was dead-lettered."""
        if self.refusal is not None:
            return self.refusal
        if self.task is None:
            return "no worker can read it"
        return f"{self.deliveries} workers took it and none finished it"


@dataclass(frozen=True, kw_only=True)
class DeadPosition:
    """A position in the list of messages."""

    #: Whether the valid messages have all been listed.
    is_refused: bool
    #: How many messages of that kind are older; at least 1.
    older: int


@dataclass(frozen=True, kw_only=True)
class VerifiedMessage:
    """The verified content of a message; created only by ``DeadLetters.verify``."""

    message: DeadMessage
    task: str
    lane: str
    args: list[Any]
    time_limits: list[float | None]
    #: None for a message that announces a row (a round, a job), which contains the work.
    invocation: Invocation | None

    @property
    def summary(self) -> str:
        """What runs when it is sent again."""
        call, where = self.invocation, f"{self.task} on lane {self.lane}"
        if call is None:
            return f"{where}: processes the pending work that the database records"
        user = "" if call.user_id is None else f" as user {call.user_id}"
        return f"{where} in chat {call.chat_key}{user}, {len(call.args)} bytes of arguments"


class DeadLetters:
    """The dead letters of one Redis; blocking. Every method may raise BrokerUnavailableError."""

    def __init__(self, app: NekroApp, *, signer: Signer) -> None:
        """Create the client; the first method connects.

        Raises:
            UsageError: the broker is not Redis.
        """
        settings = app.nekro_settings.broker
        if settings.url is None or not is_redis(settings.url):
            raise UsageError(
                "this broker keeps dead letters in its queues nekro.dead and nekro.refused; use its own tools"
            )
        self._app, self._signer, self._url = app, signer, settings.url
        keys = Keys(prefix=settings.key_prefix)
        self._prefix, self._dead, self._refused = settings.key_prefix, keys.dead, keys.refused
        self._client = RedisEndpoint(settings, settings.url).client()

    def newest(self, *, limit: int) -> list[DeadMessage]:
        """List messages, newest first: valid ones before refused ones."""
        return self.page(limit=limit)[0]

    def page(
        self, *, limit: int, after: DeadPosition | None = None
    ) -> tuple[list[DeadMessage], DeadPosition | None]:
        """List messages as ``newest`` does; returns also the position of the next page, None at the end.

        A message that is added or removed between two pages hides none: one may occur on both of them.

        Args:
            after: position that the page before returned; None begins with the newest.
        """
        found: list[DeadMessage] = []
        try:
            if after is None or not after.is_refused:
                raw, older = self._older(self._dead, None if after is None else after.older, limit)
                found += map(_read, raw)
                if older:
                    return found, DeadPosition(is_refused=False, older=older)
            of_refused = after.older if after is not None and after.is_refused else None
            raw, older = self._older(self._refused, of_refused, limit - len(found))
        except (redis.RedisError, OSError) as exc:
            raise unavailable(self._url, exc) from exc
        found += map(_read_refused, raw)
        return found, DeadPosition(is_refused=True, older=older) if older else None

    def _older(self, key: str, older: int | None, limit: int) -> tuple[list[bytes], int]:
        """Return up to ``limit`` of the ``older`` oldest entries of a list, and how many are left then."""
        # Counted from the end, because new entries are added at the front.
        length: Any = self._client.llen(key)
        older = length if older is None else min(older, length)
        if not limit or not older:
            return [], older
        entries: Any = self._client.lrange(key, -older, limit - older - 1 if limit < older else -1)
        return entries, older - len(entries) if entries else 0

    def drop(self, message: DeadMessage) -> bool:
        """Delete a message; False when it no longer exists."""
        key = self._dead if message.refusal is None else self._refused
        try:
            removed: Any = self._client.lrem(key, 1, message.raw)  # type: ignore[arg-type]
            return bool(removed)
        except (redis.RedisError, OSError) as exc:
            raise unavailable(self._url, exc) from exc

    def verify(self, message: DeadMessage) -> VerifiedMessage:
        """Check that a message is signed, unaltered, and for the queue that it came from.

        Raises:
            MessageRefusedError: it is not; the message says what is wrong.
        """
        if message.refusal is not None or message.task is None:
            raise MessageRefusedError(f"message {message.id} cannot be sent again: {message.reason}; drop it")
        try:
            return self._verified(message)
        except MessageRefusedError as exc:
            raise MessageRefusedError(
                f"message {message.id} cannot be sent again: {exc}; it was altered or is not ours; "
                f"`nekro dead drop {message.id}` deletes it"
            ) from exc

    def find(self, message_id: str) -> DeadMessage:
        """Return a message by its id.

        Raises:
            NotFoundError: there is none.
        """
        after: DeadPosition | None = None
        while True:
            found, after = self.page(limit=_PAGE, after=after)
            for message in found:
                if message.id == message_id:
                    return message
            if after is None:
                raise NotFoundError(f"no dead letter has the id {message_id}")

    def checked(self, message: DeadMessage) -> dict[str, Any]:
        """Return ``signature``, and the fields that it covers: ``summary``, ``chat_key``, ``deadline``."""
        try:
            verified = self.verify(message)
        except MessageRefusedError:
            return {"signature": "not valid", "summary": None, "chat_key": None, "deadline": None}
        call = verified.invocation
        return {
            "signature": "valid",
            "summary": verified.summary,
            "chat_key": None if call is None else call.chat_key,
            "deadline": None if call is None else call.deadline,
        }

    def retry(self, verified: VerifiedMessage, *, timeout_seconds: float | None) -> None:
        """Put a message back into its queue; no caller waits for its result.

        Args:
            timeout_seconds: new deadline of a call, from now; None keeps its deadline.

        Raises:
            UsageError: the deadline has passed, or the queue is not in the settings.
            NotFoundError: it was sent again or dropped meanwhile.
        """
        if verified.lane not in self._app.amqp.queues:
            raise UsageError(
                f"queue {verified.lane} of message {verified.message.id} is not in these settings "
                "(NEKRO_WORKERS__PINNED_PLUGINS); run this with the workers' settings"
            )
        again = encode_message(self._built(verified, timeout_seconds), queue=verified.lane)
        keys = (self._dead, f"{self._prefix}{verified.lane}")
        try:
            is_sent: Any = self._client.eval(SEND_AGAIN, len(keys), *keys, verified.message.raw, again)
        except (redis.RedisError, OSError) as exc:
            raise unavailable(self._url, exc) from exc
        if not is_sent:
            raise NotFoundError(f"dead letter {verified.message.id} was sent again or dropped meanwhile")

    def close(self) -> None:
        """Close the connection."""
        self._client.close()

    def _built(self, verified: VerifiedMessage, timeout_seconds: float | None) -> Any:
        invocation = verified.invocation
        if invocation is None:
            hard, soft = verified.time_limits
            return self._app.amqp.signed_task(
                verified.message.id,
                verified.task,
                verified.args,
                queue=verified.lane,
                time_limit=hard,
                soft_time_limit=soft,
            )
        if timeout_seconds is not None:
            return CallMessage.renewed(
                invocation, signer=self._signer, lane=verified.lane, timeout_seconds=timeout_seconds
            ).build(self._app)
        if invocation.remaining_seconds() <= 0:
            raise UsageError(
                f"the deadline of call {invocation.call_id} was {invocation.deadline:%Y-%m-%d %H:%M:%S} UTC; "
                "set a new one with `--timeout SECONDS`"
            )
        return CallMessage(
            invocation=invocation, body=verified.args[0], lane=verified.lane, reply_to=None
        ).build(self._app)

    def _verified(self, message: DeadMessage) -> VerifiedMessage:
        try:
            task = _as_delivered(message.raw)
            args = task.payload[0]
            admit(task, self._app.task_seal)
        except MessageRefusedError:
            raise
        except Exception as exc:  # the message may have any shape
            raise MessageRefusedError(f"it cannot be read ({type(exc).__name__})") from exc
        headers = task.headers
        return VerifiedMessage(
            message=message,
            task=headers["task"],
            lane=delivered_from(task),
            args=args,
            time_limits=headers["timelimit"],
            invocation=self._invocation(headers["task"], message.id, args),
        )

    def _invocation(self, task: str, task_id: str, args: list[Any]) -> Invocation | None:
        if task in (DRAIN_TASK, JOB_TASK):
            return None
        if len(args) != 1:
            raise MessageRefusedError("its body is not that of a call")
        invocation = self._signer.verify(args[0], task_name=task)
        if invocation.call_id != task_id:
            raise MessageRefusedError(f"signed as call {invocation.call_id}, sent as {task_id}")
        return invocation


def _as_delivered(raw: bytes) -> Any:
    """Return a message in the form that a worker's consumer receives, without a connection."""
    entry = plain_json.load(raw)
    properties = entry["properties"]
    if uncompressed(entry["headers"]):
        raise MessageRefusedError("it is compressed")
    return SimpleNamespace(
        headers=entry["headers"],
        properties=properties,
        delivery_info=properties["delivery_info"],
        content_type=entry["content-type"],
        content_encoding=entry["content-encoding"],
        payload=stored_body(entry),
    )


def _read_refused(raw: bytes) -> DeadMessage:
    try:
        entry = json.loads(raw)
        reason, size, text = str(entry["reason"]), int(entry["bytes"]), str(entry["message"])
    except (TypeError, ValueError, LookupError, RecursionError):
        reason, size, text = "message refused: its record cannot be read", len(raw), ""
    read = _read(text.encode("utf-8", "replace"))
    own = read.id if read.task is not None else f"{RAW_PREFIX}{hashlib.sha256(raw).hexdigest()[:12]}"
    return replace(read, id=own, raw=raw, size_bytes=size, refusal=reason[:200])


def _read(raw: bytes) -> DeadMessage:
    unreadable = DeadMessage(
        id=f"{RAW_PREFIX}{hashlib.sha256(raw).hexdigest()[:12]}",
        task=None,
        lane=None,
        deliveries=0,
        size_bytes=len(raw),
        raw=raw,
    )
    try:
        message = json.loads(raw)
        headers, info = message["headers"], message["properties"]["delivery_info"]
        task_id, task = headers["id"], headers["task"]
    except (TypeError, ValueError, LookupError, RecursionError):
        return unreadable
    if not isinstance(headers, Mapping) or not isinstance(task_id, str) or not isinstance(task, str):
        return unreadable
    return DeadMessage(
        id=task_id,
        task=task,
        lane=str(info.get("routing_key")) if isinstance(info, Mapping) else None,
        deliveries=deliveries(headers),
        size_bytes=len(raw),
        raw=raw,
    )
