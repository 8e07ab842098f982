"""The result backend: Celery's Redis backend, plus delivery to the waiting caller.

A result is stored under its usual key and published on its usual channel, so ``AsyncResult``, Flower
and scripts see it. If the message names a caller in ``reply_to``, the same script announces the result on
that caller's channel, which saves the caller one subscription per call; the caller reads a long or missed
result under its key. On an event loop, storing is asynchronous and pipelined.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final
from weakref import WeakKeyDictionary

from celery import states
from celery.backends.redis import RedisBackend
from celery.exceptions import BackendStoreError
from kombu.utils.encoding import bytes_to_str, str_to_bytes

from broker_config.keys import Keys, is_caller_id
from broker_config.redis_endpoint import RedisEndpoint
from broker_config.redis_library import redis
from broker_config.urls import without_password
from nekro.base.greenlet_bridge import at_loop_close, await_here, can_await
from nekro.broker.delivery.offers import OFFER, OFFER_SECONDS, Ending
from nekro.broker.delivery.transport import SERVER_HEADER
from nekro.broker.redis.link import RedisLink, Script
from nekro.broker.redis.losses import Repeats
from nekro.wire import plain_json

__all__ = ["ReplyBackend"]

#: Longer results are announced by their id. Redis disconnects a subscriber that is 32 MiB behind (its
#: default); such a caller reads its results under their keys.
MAX_ANNOUNCED_BYTES: Final = 64 << 10

#: Stores a result, publishes it, announces it to the waiting caller, acknowledges the delivery and offers its
#: place, atomically. KEYS: result (string; its channel has the same name), the caller's channel or "",
#: then, for a delivery, its index and held (``nekro.broker.delivery.transport.CLAIM``) and, for an offer, its
#: offers. ARGV: payload, expiry of the result in seconds (0: never), announcement ("": the payload itself),
#: tag, offer, lifetime of the offer in seconds. Returns 0 if this server has no such delivery, else 1.
STORE: Final = Script(f"""{OFFER}
if ARGV[2] == '0' then
    redis.call('SET', KEYS[1], ARGV[1])
else
    redis.call('SET', KEYS[1], ARGV[1], 'EX', ARGV[2])
end
redis.call('PUBLISH', KEYS[1], ARGV[1])
if KEYS[2] ~= '' then redis.pcall('PUBLISH', KEYS[2], ARGV[3] == '' and ARGV[1] or ARGV[3]) end
local is_ended = 1
if KEYS[3] then
    is_ended = redis.call('HDEL', KEYS[4], ARGV[4])
    redis.call('ZREM', KEYS[3], ARGV[4])
end
if KEYS[5] then offer(KEYS[5], ARGV[5], ARGV[6]) end
return is_ended
""")


@dataclass(frozen=True, slots=True)
class _Stored:
    """A result that was stored, as keys and arguments of ``STORE``."""

    keys: list[str | bytes]
    values: list[Any]
    is_success: bool


class ReplyBackend(RedisBackend):  # type: ignore[misc]
    """Stores results for Celery and announces them to ``nekro.broker.calls.MethodCaller``."""

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
        #: The part of a result's key before the id.
        self._before_id: bytes = self.get_key_for_task("-")[:-1]
        #: Results that callers wait for; a primary that was replaced may have lost them.
        self._repeats: Repeats[_Stored] = Repeats(endpoint.primary, self._repeat)
        self._links: WeakKeyDictionary[asyncio.AbstractEventLoop, RedisLink] = WeakKeyDictionary()
        self.app.backends.add(self)

    def at(self, server: int) -> ReplyBackend:
        """Return the backend of the server that delivered a task; callers listen there for its result."""
        backend: ReplyBackend = self.app.servers[server].backend if server else self
        return backend

    def as_uri(self, include_password: bool = False) -> str:
        """Return the URL of the settings; a list of URLs if it names Sentinels."""
        url: str = self.url
        return url if include_password else without_password(url)

    def disconnect(self) -> None:
        """Close the connections of the blocking client; an event loop closes its own at its end."""
        if "client" in vars(self):
            self.client.connection_pool.disconnect()

    def on_task_call(self, producer: Any, task_id: str) -> None:
        """Do nothing; Celery would subscribe to the result when a task is sent.

        That costs a round trip per call, leaks a channel per result that is not awaited, and fails
        permanently if Redis is down at the first call. ``AsyncResult.get`` subscribes itself.
        """

    async def store_success(
        self, task_id: str, result: Any, *, reply_to: str | None, ending: Ending | None = None
    ) -> bool:
        """Store the result of a successful task without callbacks, and announce it to the waiting caller.

        Args:
            result: plain JSON data.
            ending: how to end its delivery, if the broker's Redis also stores results; else None. A delivery
                that this server does not have is not ended: if another server is the primary, the result is
                stored there again, which ends it.

        Returns:
            False when it could not be stored; Celery's own path then retries or reports the error.
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
            payload = plain_json.dump(meta)
            if len(payload) > self._MAX_STR_VALUE_SIZE:
                return False
            keys, values = self._for_script(
                task_id, key, payload, state=states.SUCCESS, reply_to=reply_to, ending=ending
            )
            link, term = self._link(), self._repeats.term
            if not await link.run(STORE, keys, *values):
                # The delivery was given to another worker, or this is not the server that delivered it.
                link.doubt()
                await link.connect()
            self._remember(keys, values, term)
        except (TypeError, ValueError, RecursionError, redis.RedisError, OSError):
            return False
        return True

    def store_progress(self, task_id: str, meta: Mapping[str, Any]) -> None:
        """Store the progress of a running task as state ``PROGRESS``, without retries."""
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
        if request is not None and (server := getattr(request, SERVER_HEADER, 0)) and not self.app.server:
            return self.at(server)._store_result(task_id, result, state, traceback, request, **kwargs)
        if state != states.SUCCESS and self._has_succeeded(task_id):
            return result  # a worker that was presumed dead must not overwrite a success
        meta = self._get_result_meta(result=result, state=state, traceback=traceback, request=request)
        meta["task_id"] = bytes_to_str(task_id)
        if state == states.FAILURE:
            # Where in the plugin's source it was raised; ``nekro.broker.failures`` reads it.
            meta["frames"] = [frame.as_record() for frame in getattr(request, "author_frames", ())]
        payload = self._encoded(meta)
        if len(payload) > self._MAX_STR_VALUE_SIZE:
            raise BackendStoreError("value too large for Redis backend", state=state, task_id=task_id)
        reply_to = getattr(request, "reply_to", None) if state in states.READY_STATES else None
        key = self.get_key_for_task(task_id)
        keys, values = self._for_script(meta["task_id"], key, payload, state=state, reply_to=reply_to)
        term = self._repeats.term
        # Celery retries by error class, for example while Redis is out of memory.
        if can_await():
            await_here(self._link().run(STORE, keys, *values))
        else:
            self.client.eval(STORE.text, len(keys), *keys, *values)
        if state in states.READY_STATES:
            self._remember(keys, values, term, is_success=state == states.SUCCESS)
        return result

    def _remember(
        self, keys: list[str | bytes], values: list[Any], term: int, *, is_success: bool = True
    ) -> None:
        # Without the offer of a slot, which is made anew.
        self._repeats.add(_Stored(keys[:4], values[:4], is_success), size=len(values[0]), term=term)

    def _repeat(self, stored: Sequence[_Stored]) -> None:
        for each in stored:
            if each.is_success or not self._is_success(each.keys[0]):
                self.client.eval(STORE.text, len(each.keys), *each.keys, *each.values)

    def _for_script(
        self,
        task_id: str,
        key: bytes,
        payload: bytes,
        *,
        state: str,
        reply_to: Any,
        ending: Ending | None = None,
    ) -> tuple[list[str | bytes], list[Any]]:
        """Return keys and arguments of ``STORE``."""
        keys: list[str | bytes] = [key, self._keys.reply(reply_to) if is_caller_id(reply_to) else ""]
        expires_seconds = self.failure_expires if state == states.FAILURE else self.expires
        announcement = "" if len(payload) <= MAX_ANNOUNCED_BYTES else json.dumps({"task_id": task_id})
        values: list[Any] = [payload, expires_seconds or 0, announcement]
        if ending is not None:
            index, held, tag = ending.ack
            keys += [index, held]
            values.append(tag)
            if ending.offer is not None:
                keys.append(ending.offer.key)
                values += [ending.offer.text, OFFER_SECONDS]
        return keys, values

    def _encoded(self, meta: dict[str, Any]) -> bytes:
        try:
            # The same output as Celery's serializer in a third of its time.
            return json.dumps(meta).encode()
        except TypeError:  # Celery's serializer supports more types: times, UUIDs, decimals
            encoded: bytes = str_to_bytes(self.encode(meta))
            return encoded

    def _has_succeeded(self, task_id: str) -> bool:
        return self._is_success(self.get_key_for_task(task_id))

    def _is_success(self, key: str | bytes) -> bool:
        # Read without Celery's decoder, which would create exception classes from names in Redis.
        raw = self._read(key)
        return raw is not None and json.loads(raw).get("status") == states.SUCCESS

    def _set(self, key: bytes, value: bytes | str, expires: int | None = None) -> None:
        # As in Celery, but with SET … EX, because redis-py warns about SETEX.
        seconds = self.expires if expires is None else expires
        with self.client.pipeline() as pipeline:
            pipeline.set(key, value, ex=seconds or None).publish(key, value).execute()

    def _read(self, key: str | bytes) -> bytes | None:
        found: Any = await_here(self._link().execute("GET", key)) if can_await() else self.client.get(key)
        return None if found is None else str_to_bytes(found)

    def _sleep(self, amount: float) -> None:
        # Called between two attempts to store a result; other tasks of the loop must continue.
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
