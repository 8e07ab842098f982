"""Task messages that are signed, and tasks whose arguments and results stay out of logs and events.

Every task message of the application is made here, with the signature that ``broker_config.admission``
verifies. Its body is a signed invocation with what a chat said inside. Celery copies a representation of
it into the message's headers, and from there into events (Flower), log lines and ``inspect`` replies; here
each of those copies is a placeholder.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from celery import Task
from celery.app.amqp import AMQP, task_message
from celery.utils.saferepr import saferepr
from celery.worker.request import Request

from broker_config.admission import HIDDEN, SIGNATURE_HEADER, signed_fields
from broker_config.connection import ClaimConnection
from broker_config.keys import is_caller_id
from broker_config.transport import ClaimChannel

if TYPE_CHECKING:
    from broker_config.handoff import Ending

__all__ = ["RELEASED_BODY", "PrivateAMQP", "PrivateRequest", "PrivateTask"]

#: Headers of Celery's that a worker would not act on.
_UNSUPPORTED: Final = ("eta", "expires", "group", "retries", "ignore_result", "stamped_headers")
#: Characters of a result's representation in logs and events: enough for ids and types.
RESULT_CHARS: Final = 64
#: Stands for the body of a request that has released its own: one argument, and nothing that follows.
RELEASED_BODY: Final = b"[[null], {}, {}]"
#: The same for who has read it: positional and named arguments, and what follows.
_NOTHING: Any = ((), {}, {})


class PrivateAMQP(AMQP):  # type: ignore[misc]
    """Builds signed task messages that show no arguments, and connections that lose none of them."""

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
        """Build a task message, signed for one queue.

        Args:
            args: plain JSON data.
            reply_to: the ``MethodCaller`` that waits; None, and any text that is no caller's: nobody does.
            time_limit: in seconds, as the soft one; None: the task's own.

        Raises:
            TypeError, ValueError: the arguments are no plain JSON.
        """
        caller = reply_to if is_caller_id(reply_to) else ""
        headers = {
            "lang": "py",
            "task": name,
            "id": task_id,
            "timelimit": [time_limit, soft_time_limit],
            "argsrepr": HIDDEN,
            "kwargsrepr": HIDDEN,
        }
        headers[SIGNATURE_HEADER] = self.app.task_seal.sign(
            signed_fields(headers, queue=queue, reply_to=caller, args=args)
        )
        properties = {"correlation_id": task_id, "reply_to": caller}
        return task_message(headers=headers, properties=properties, body=(args, {}, {}), sent_event=None)

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
        """Build a message for Celery's own ways to send a task, as ``signed_task`` does.

        Raises:
            ValueError: it asks for what no worker would do: named arguments, a date, callbacks and the like.
        """
        message = super().as_task_v2(task_id, name, args, kwargs, *further, **options)
        headers, (_, named, embed) = message.headers, message.body
        if named or any(embed.values()) or any(headers[field] for field in _UNSUPPORTED):
            raise ValueError(
                f"task {name}: workers take positional arguments and time limits; no named arguments, "
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
    """A delivery that ``inspect active`` and its siblings describe without arguments."""

    @property
    def ending(self) -> Ending | None:
        """What storing its result may do besides; None: it ends in Celery's way alone."""
        channel = self._message.channel
        intake = channel.intake if isinstance(channel, ClaimChannel) else None
        return None if intake is None else intake.ending(self._message.delivery_tag)

    def release_body(self) -> None:
        """Forget the message but for its headers: thousands of calls may wait, and their bodies are large.

        For a request whose task has its arguments: what Celery does from then on needs none of it, and
        Redis has the message.
        """
        message = self._message
        message.headers = self._request_dict
        message.body = self._body = RELEASED_BODY
        message._decoded_cache = self._Request__payload = self._payload = _NOTHING
        self._request_dict["args"] = self._args = ()
        if hasattr(message, "_raw"):
            message._raw = None

    def shown(self, result: Any) -> str:
        """A result as events show it; empty while nobody watches."""
        if self.eventer is None or not self.eventer.enabled or not getattr(self.eventer, "is_watched", True):
            return ""
        text: str = saferepr(result, RESULT_CHARS)
        return text

    def info(self, safe: bool = False) -> dict[str, Any]:
        """Describe the delivery; ``safe`` or not, arguments are placeholders."""
        described: dict[str, Any] = super().info(safe=True)
        return described


class PrivateTask(Task):  # type: ignore[misc]
    """Base class of every task of the app."""

    Request = "broker_config.private_tasks:PrivateRequest"
    resultrepr_maxsize = RESULT_CHARS
