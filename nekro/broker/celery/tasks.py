"""Task messages as workers see them: verified before Celery reads them, and never shown.

Celery acts on far more of a message than its task and arguments: callbacks, chains, groups, dates, time
limits, reply addresses. So ``admit`` verifies the signature of each message before Celery reads it, and
then reduces it to the fields that its signature covers: task, id, queue, arguments, time limits and the
waiting caller. The worker sets all other fields. Every task message passes this check, on every pool and
broker. Arguments that are a signed invocation are covered by that invocation's signature, which the handler
verifies, so they are not hashed twice.

``nekro.broker.delivery.messages`` builds the messages. Their body is a signed invocation that contains chat
data; each copy of it that Celery shows in logs and events is a placeholder.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from celery import Task
from celery.app.amqp import AMQP
from celery.utils.saferepr import saferepr
from celery.worker.request import Request

from broker_config.keys import is_caller_id
from broker_config.topology import AGENT_EVENTS
from nekro.broker.delivery.connection import ClaimConnection
from nekro.broker.delivery.messages import HIDDEN, SIGNATURE_HEADER, signed_fields, signed_message
from nekro.broker.delivery.transport import DELIVERIES_HEADER, SERVER_HEADER, ClaimChannel, server_of
from nekro.wire.seals import Seal
from nekro_agent.errors import MessageRefusedError
from nekro_agent.methods import Lane

if TYPE_CHECKING:
    from nekro.broker.delivery.offers import Ending

__all__ = [
    "MAX_ID_CHARS",
    "RELEASED_BODY",
    "PrivateAMQP",
    "PrivateRequest",
    "PrivateTask",
    "admit",
    "delivered_from",
]

#: More than our own and Celery's ids ever have.
MAX_ID_CHARS: Final = 255
#: Headers that are kept: the delivery counts of the transports (ours, RabbitMQ's), the signature, which a
#: dead letter needs again, and the call's trace. Values are integers, or strings up to this length.
_PASSED_ON: Final = (DELIVERIES_HEADER, "x-delivery-count", SIGNATURE_HEADER, "traceparent", "tracestate")

_MAX_PASSED_CHARS: Final = 512
#: Celery's names for work that follows a task. All of it must be empty.
_EMBED: Final = frozenset(("callbacks", "errbacks", "chain", "chord"))


def delivered_from(message: Any) -> str:
    """Return the name of the queue that a message was taken from.

    ``ClaimChannel`` and RabbitMQ set it; kombu's own Redis transport trusts the message's field.
    """
    info = message.delivery_info or {}
    if info.get("exchange") == AGENT_EVENTS.name:
        return Lane.ROUNDS.value
    return str(info.get("routing_key"))


def admit(message: Any, seal: Seal) -> None:
    """Verify a delivered message, and replace its headers and properties by the signed fields.

    Raises:
        MessageRefusedError: it is unsigned, was altered, or was signed for another queue, task or id.
        Exception: of any class, when it cannot be decoded.
    """
    headers, args = message.headers, _arguments(message)
    _check(headers)
    reply_to = (message.properties or {}).get("reply_to") or ""
    if reply_to and not is_caller_id(reply_to):
        raise MessageRefusedError("message refused: its reply_to is not a caller id")
    fields = signed_fields(headers, queue=delivered_from(message), reply_to=reply_to, args=args)
    if not seal.fits(fields, headers.get(SIGNATURE_HEADER)):
        reason = "its signature does not match" if SIGNATURE_HEADER in headers else "it is not signed"
        raise MessageRefusedError(f"message refused: {reason} (was NEKRO_SECURITY__SIGNING_KEY changed?)")
    message.headers = _rebuilt(headers)
    if server := server_of(message):
        message.headers[SERVER_HEADER] = server
    message.properties = {
        **_kept(message.properties),
        "reply_to": reply_to or None,
        "correlation_id": headers["id"],
        "priority": 0,
    }


def _arguments(message: Any) -> list[Any]:
    # Celery decodes a body twice on some paths; with a fixed encoding both results are the same.
    if message.content_type != "application/json" or message.content_encoding != "utf-8":
        raise MessageRefusedError("message refused: only JSON in UTF-8 is accepted")
    payload = message.payload
    if not isinstance(payload, list) or len(payload) != 3 or not isinstance(payload[0], list):
        raise MessageRefusedError("message refused: its body is not that of a task")
    args: list[Any]
    args, kwargs, embed = payload
    if kwargs or not isinstance(kwargs, dict) or not isinstance(embed, dict):
        raise MessageRefusedError("message refused: named arguments are not allowed")
    if any(embed.values()) or not _EMBED.issuperset(embed):
        raise MessageRefusedError("message refused: callbacks, chains and chords are not allowed")
    return args


def _check(headers: dict[str, Any]) -> None:
    task_id, limits = headers.get("id"), headers.get("timelimit")
    if not isinstance(task_id, str) or not 0 < len(task_id) <= MAX_ID_CHARS:
        raise MessageRefusedError(
            f"message refused: its id is not a string of 1 to {MAX_ID_CHARS} characters"
        )
    if not isinstance(headers.get("task"), str):
        raise MessageRefusedError("message refused: its task is not a string")
    if not isinstance(limits, list) or len(limits) != 2:
        raise MessageRefusedError("message refused: its time limits are not a pair")


def _rebuilt(headers: dict[str, Any]) -> dict[str, Any]:
    task_id = headers["id"]
    rebuilt = {
        "lang": "py",
        "task": headers["task"],
        "id": task_id,
        "root_id": task_id,
        "parent_id": None,
        "group": None,
        "timelimit": headers["timelimit"],
        "retries": 0,
        "eta": None,
        "expires": None,
        "argsrepr": HIDDEN,
        "kwargsrepr": HIDDEN,
    }
    for name in _PASSED_ON:
        value = headers.get(name)
        if type(value) is int or (type(value) is str and len(value) <= _MAX_PASSED_CHARS):
            rebuilt[name] = value
    return rebuilt


def _kept(properties: Mapping[str, Any]) -> dict[str, Any]:
    """Return the properties that the transport needs to acknowledge the message."""
    return {name: properties[name] for name in ("delivery_tag", "delivery_info") if name in properties}


#: Headers of Celery that our workers ignore.
_UNSUPPORTED: Final = ("eta", "expires", "group", "retries", "ignore_result", "stamped_headers")
#: Characters of a result's representation in logs and events: enough for ids and types.
RESULT_CHARS: Final = 64
#: Replaces the body of a request after ``release_body``: one argument and no callbacks.
RELEASED_BODY: Final = b"[[null], {}, {}]"
#: Replaces the decoded body: positional arguments, named arguments and callbacks.
_NOTHING: Any = ((), {}, {})


class PrivateAMQP(AMQP):  # type: ignore[misc]
    """Builds signed task messages that show no arguments, and connections that lose no messages."""

    Connection = ClaimConnection

    def drop_producers(self) -> None:
        """Forget the producers of closed connections: their channels keep descriptors open."""
        self._producer_pool = None

    def signed_task(
        self,
        task_id: str,
        name: str,
        args: Sequence[Any],
        *,
        queue: str,
        reply_to: str | None = None,
        time_limit: float | None = None,
        soft_time_limit: float | None = None,
    ) -> Any:
        """Build a task message; see ``nekro.broker.delivery.messages.signed_message``."""
        return signed_message(
            self.app.task_seal,
            task_id,
            name,
            args,
            queue=queue,
            reply_to=reply_to,
            time_limit=time_limit,
            soft_time_limit=soft_time_limit,
        )

    def as_task_v2(
        self,
        task_id: str,
        name: str,
        args: Any = None,
        kwargs: Any = None,
        *further: Any,
        queue: Any = None,
        **options: Any,
    ) -> Any:
        """Build a signed message when a task is sent with Celery's own API.

        Raises:
            ValueError: an unsupported feature is used: named arguments, eta, callbacks and similar.
        """
        message = super().as_task_v2(task_id, name, args, kwargs, *further, **options)
        headers, (_, named, embed) = message.headers, message.body
        if named or any(embed.values()) or any(headers[field] for field in _UNSUPPORTED):
            raise ValueError(
                f"task {name}: only positional arguments and time limits are supported; no named arguments, "
                "dates, retries, groups, stamps, callbacks, chains or chords"
            )
        hard, soft = headers["timelimit"]
        return self.signed_task(
            task_id,
            name,
            args or (),
            queue=getattr(queue, "name", queue) or self.app.conf.task_default_queue,
            reply_to=message.properties["reply_to"],
            time_limit=hard,
            soft_time_limit=soft,
        )


class PrivateRequest(Request):  # type: ignore[misc]
    """A delivery that ``inspect active`` and similar commands describe without arguments."""

    @property
    def ending(self) -> Ending | None:
        """How storing the result also ends the delivery; None if Celery acknowledges it."""
        channel = self._message.channel
        intake = channel.intake if isinstance(channel, ClaimChannel) else None
        return None if intake is None else intake.ending(self._message.delivery_tag)

    @property
    def server(self) -> int:
        """Place of the server that delivered it among those that chats are partitioned over."""
        return server_of(self._message)

    def release_body(self) -> None:
        """Release the message's body, which is large, while thousands of calls may be waiting.

        Call it when the task has its arguments: Celery no longer needs the body, and Redis has the message.
        """
        message = self._message
        message.headers = self._request_dict
        message.body = self._body = RELEASED_BODY
        message._decoded_cache = self._Request__payload = self._payload = _NOTHING
        self._request_dict["args"] = self._args = ()
        if hasattr(message, "_raw"):
            message._raw = None

    def shown(self, result: Any) -> str:
        """Return a result's representation for events; empty while events are not watched."""
        if self.eventer is None or not self.eventer.enabled or not getattr(self.eventer, "is_watched", True):
            return ""
        text: str = saferepr(result, RESULT_CHARS)
        return text

    def info(self, safe: bool = False) -> dict[str, Any]:
        """Describe the delivery; arguments are placeholders regardless of ``safe``."""
        described: dict[str, Any] = super().info(safe=True)
        return described


class PrivateTask(Task):  # type: ignore[misc]
    """Base class of all tasks of the app."""

    Request = "nekro.broker.celery.tasks:PrivateRequest"
    resultrepr_maxsize = RESULT_CHARS
