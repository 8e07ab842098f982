"""The result backend: Celery's, plus a push to the caller that waits.

A finished task is stored under its ordinary key and published on its ordinary channel, so
``AsyncResult``, Flower and scripts see it. When its message names a caller in ``reply_to``,
the same step pushes the result to that caller's list, which saves the caller one
subscription per call. On an event loop no result waits for another, and none blocks the loop.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakKeyDictionary

from celery import states
from celery.backends.redis import RedisBackend
from celery.exceptions import BackendStoreError
from kombu.utils.encoding import bytes_to_str, str_to_bytes
from redis.exceptions import RedisError

from broker_config import plain_json
from broker_config.bridge import at_loop_close, await_here, can_await
from broker_config.keys import REPLY_SECONDS, Keys, is_caller_id
from broker_config.offers import OFFER, OFFER_SECONDS
from broker_config.redis_endpoint import RedisEndpoint
from broker_config.redis_link import RedisLink, Script
from broker_config.subscription import MAX_PUBLISHED_BYTES
from broker_config.urls import without_password

if TYPE_CHECKING:
    from broker_config.handoff import Ending

__all__ = ["ReplyBackend"]

#: Stores a result, tells its subscribers, gives it to the caller that waits, acknowledges the delivery
#: and offers its place, in one step. KEYS: result (string; its channel has the same name), reply list
#: (and channel) or "", then, for a delivery, its index and held (``broker_config.transport.CLAIM``) and
#: for an offer its offers. ARGV: payload, seconds until the result expires (0: never), seconds until the
#: list does, longest payload that is published to the caller, tag, offer, seconds.
STORE: Final = Script(f"""{OFFER}
if ARGV[2] == '0' then
    redis.call('SET', KEYS[1], ARGV[1])
else
    redis.call('SET', KEYS[1], ARGV[1], 'EX', ARGV[2])
end
redis.call('PUBLISH', KEYS[1], ARGV[1])
if KEYS[2] ~= '' then
    local readers = 0
    if #ARGV[1] <= tonumber(ARGV[4]) then readers = redis.pcall('PUBLISH', KEYS[2], ARGV[1]) end
    if readers ~= 1 then
        redis.call('RPUSH', KEYS[2], ARGV[1])
        redis.call('EXPIRE', KEYS[2], ARGV[3])
    end
end
if KEYS[3] then
    redis.call('HDEL', KEYS[4], ARGV[5])
    redis.call('ZREM', KEYS[3], ARGV[5])
end
if KEYS[5] then offer(KEYS[5], ARGV[6], ARGV[7]) end
return 1
""")


@dataclass(frozen=True, kw_only=True)
class StoredResult:
    """One result on its way to Redis."""

    key: bytes
    payload: bytes
    #: None keeps the result for ever.
    expires_seconds: int | None
    #: List of the caller that waits; None when nobody named one.
    reply_key: str | None
    #: A longer payload goes to the caller's list without a look whether it listens; 0: all do.
    longest_published: int

    def for_script(self, ending: Ending | None = None) -> tuple[list[str | bytes], list[Any]]:
        """Keys and values for ``STORE``."""
        keys: list[str | bytes] = [self.key, self.reply_key or ""]
        values: list[Any] = [self.payload, self.expires_seconds or 0, REPLY_SECONDS, self.longest_published]
        if ending is not None:
            index, held, tag = ending.ack
            keys += [index, held]
            values.append(tag)
            if ending.offer is not None:
                keys.append(ending.offer.key)
                values += [ending.offer.text, OFFER_SECONDS]
        return keys, values


class ReplyBackend(RedisBackend):  # type: ignore[misc]
    """Stores results for Celery and pushes them to ``broker_config.calls.MethodCaller``."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        settings = self.app.nekro_settings
        self.url = settings.results.url or settings.broker.url
        endpoint = RedisEndpoint(settings.broker, self.url)
        kept = ("max_connections", "health_check_interval", "driver_info")
        of_celery: dict[str, Any] = vars(self)["connparams"]
        self.connparams = {
            **{name: of_celery[name] for name in kept},
            "connection_class": endpoint.connection_class,
            **endpoint.parameters(),
        }
        prefix = self.app.conf.result_backend_transport_options.get("global_keyprefix", "")
        self._keys = Keys(prefix=prefix)
        #: What stands before the id in the key of a result.
        self._before_id: bytes = self.get_key_for_task("-")[:-1]
        self._longest_published = MAX_PUBLISHED_BYTES if self.app.nekro_settings.broker.handoff else 0
        self._links: WeakKeyDictionary[asyncio.AbstractEventLoop, RedisLink] = WeakKeyDictionary()

    def as_uri(self, include_password: bool = False) -> str:
        """The URL of the settings; a list where it names Sentinels."""
        url: str = self.url
        return url if include_password else without_password(url)

    def on_task_call(self, producer: Any, task_id: str) -> None:
        """Subscribe to nothing when a task is sent.

        Celery subscribes here already, which costs a round trip per call, leaks a channel
        per result that nobody waits for, and fails for good when Redis is down at the first
        call. ``AsyncResult.get`` subscribes by itself.
        """

    async def store_success(
        self, task_id: str, result: Any, *, reply_to: str | None, ending: Ending | None = None
    ) -> bool:
        """Store the result of a task that nothing follows, and give it to the caller that waits.

        Args:
            result: plain JSON data.
            ending: of its delivery, if the broker's Redis is the results' too.

        Returns False when it could not be stored so: Celery's way says why, or tries again.
        """
        try:
            meta = {
                "status": states.SUCCESS,
                "result": result,
                "traceback": None,
                "children": [],
                "date_done": datetime.now(UTC).isoformat(),
                "task_id": task_id,
            }
            key = self._before_id + task_id.encode()
            stored = self._stored(key, plain_json.dump(meta), state=states.SUCCESS, reply_to=reply_to)
            if len(stored.payload) > self._MAX_STR_VALUE_SIZE:
                return False
            keys, values = stored.for_script(ending)
            await self._link().run(STORE, keys, *values)
        except (TypeError, ValueError, RecursionError, RedisError, OSError):
            return False
        return True

    def store_progress(self, task_id: str, meta: Mapping[str, Any]) -> None:
        """Store how far a running task is, as its state ``PROGRESS``; tried once: the next report comes."""
        self._store_result(task_id, dict(meta), "PROGRESS")

    def _store_result(
        self,
        task_id: str,
        result: Any,
        state: str,
        traceback: str | None = None,
        request: Any = None,
        **kwargs: Any,
    ) -> Any:
        if state != states.SUCCESS and self._has_succeeded(task_id):
            return result  # a worker that was thought lost must not undo a success
        meta = self._get_result_meta(result=result, state=state, traceback=traceback, request=request)
        meta["task_id"] = bytes_to_str(task_id)
        payload = self._encoded(meta)
        if len(payload) > self._MAX_STR_VALUE_SIZE:
            raise BackendStoreError("value too large for Redis backend", state=state, task_id=task_id)
        reply_to = getattr(request, "reply_to", None) if state in states.READY_STATES else None
        key = self.get_key_for_task(task_id)
        self._write(self._stored(key, payload, state=state, reply_to=reply_to))
        return result

    def _stored(self, key: bytes, payload: bytes, *, state: str, reply_to: Any) -> StoredResult:
        return StoredResult(
            key=key,
            payload=payload,
            expires_seconds=(self.failure_expires if state == states.FAILURE else self.expires) or None,
            reply_key=self._keys.reply(reply_to) if is_caller_id(reply_to) else None,
            longest_published=self._longest_published,
        )

    def _encoded(self, meta: dict[str, Any]) -> bytes:
        try:
            # What Celery's serializer writes, at a third of its price.
            return json.dumps(meta).encode()
        except TypeError:  # it knows more types: times, ids, decimals
            encoded: bytes = str_to_bytes(self.encode(meta))
            return encoded

    def _has_succeeded(self, task_id: str) -> bool:
        # Read without Celery's decoder: it would build exception classes from names in Redis.
        raw = self._read(self.get_key_for_task(task_id))
        return raw is not None and json.loads(raw).get("status") == states.SUCCESS

    def _set(self, key: bytes, value: bytes | str, expires: int | None = None) -> None:
        # As in Celery, with SET … EX: redis-py warns about SETEX.
        seconds = self.expires if expires is None else expires
        with self.client.pipeline() as pipeline:
            pipeline.set(key, value, ex=seconds or None).publish(key, value).execute()

    def _read(self, key: bytes) -> bytes | None:
        found: Any = await_here(self._link().execute("GET", key)) if can_await() else self.client.get(key)
        return None if found is None else str_to_bytes(found)

    def _write(self, stored: StoredResult) -> None:
        # Celery retries by class of error: a full Redis, say, until it has memory again.
        keys, values = stored.for_script()
        if can_await():
            await_here(self._link().run(STORE, keys, *values))
        else:
            self.client.eval(STORE.text, len(keys), *keys, *values)

    def _sleep(self, amount: float) -> None:
        # Between two tries to store a result; the other tasks of the loop must go on.
        if can_await():
            await_here(asyncio.sleep(amount))
        else:
            super()._sleep(amount)

    def _link(self) -> RedisLink:
        loop = asyncio.get_running_loop()
        link = self._links.get(loop)
        if link is None:
            link = self._links[loop] = RedisLink(self.app.nekro_settings.broker, self.url)
            at_loop_close(link.close)
        return link
