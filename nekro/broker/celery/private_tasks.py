"""Signed task messages, and tasks whose arguments and results do not appear in logs and events.

``nekro.broker.delivery.task_messages`` builds the messages. Their body is a signed invocation that contains
chat data; each copy of it that Celery shows is a placeholder.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from celery import Task
from celery.app.amqp import AMQP
from celery.utils.saferepr import saferepr
from celery.worker.request import Request

from nekro.broker.delivery.connection import ClaimConnection
from nekro.broker.delivery.task_messages import signed_message
from nekro.broker.delivery.transport import ClaimChannel

if TYPE_CHECKING:
    from nekro.broker.delivery.offers import Ending

__all__ = ["RELEASED_BODY", "PrivateAMQP", "PrivateRequest", "PrivateTask"]

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
        """Build a task message; see ``nekro.broker.delivery.task_messages.signed_message``."""
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

    Request = "nekro.broker.celery.private_tasks:PrivateRequest"
    resultrepr_maxsize = RESULT_CHARS
