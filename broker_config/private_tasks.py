"""Tasks whose arguments and results stay out of logs, events and remote control.

A message's body is a signed invocation with what a chat said inside. Celery copies a
representation of it into the message's headers, and from there into events (Flower), log
lines and ``inspect`` replies; here each of those copies is a placeholder.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from celery import Task
from celery.app.amqp import AMQP
from celery.utils.saferepr import saferepr
from celery.worker.request import Request

from broker_config.transport import ClaimChannel, ClaimConnection

if TYPE_CHECKING:
    from broker_config.handoff import Ending

__all__ = ["HIDDEN", "RELEASED_BODY", "PrivateAMQP", "PrivateRequest", "PrivateTask"]

HIDDEN: Final = "(hidden)"
#: Characters of a result's representation in logs and events: enough for ids and types.
RESULT_CHARS: Final = 64
#: Stands for the body of a request that has released its own: one argument, and nothing that follows.
RELEASED_BODY: Final = b"[[null], {}, {}]"
#: The same for who has read it: positional and named arguments, and what follows.
_NOTHING: Any = ((), {}, {})


class PrivateAMQP(AMQP):  # type: ignore[misc]
    """Builds task messages whose headers show no arguments, and connections that lose none of them."""

    Connection = ClaimConnection

    def as_task_v2(self, task_id: str, name: str, *args: Any, **options: Any) -> Any:
        """Build a message as Celery does, with placeholders for the arguments' representations."""
        options["argsrepr"] = options["kwargsrepr"] = HIDDEN
        return super().as_task_v2(task_id, name, *args, **options)


class PrivateRequest(Request):  # type: ignore[misc]
    """A delivery that ``inspect active`` and its siblings describe without arguments."""

    @property
    def asks_only_for_result(self) -> bool:
        """Whether a success has no more to do than to be stored: no chain, chord, link or group."""
        fields, embed = self.request_dict, self._payload[2]
        return (
            not self.kwargs
            and isinstance(embed, dict)
            and not any(embed.values())
            and not self.ignore_result
            and fields.get("group") is None
            and fields.get("parent_id") is None
        )

    @property
    def ending(self) -> Ending | None:
        """What storing its result may do besides; None: it ends in Celery's way alone."""
        channel = self._message.channel
        intake = channel.intake if isinstance(channel, ClaimChannel) else None
        return None if intake is None else intake.ending(self._message.delivery_tag)

    def release_body(self) -> None:
        """Forget the message but for its headers: thousands of calls may wait, and their bodies are large.

        For a request that ``asks_only_for_result`` and whose task has its arguments: what Celery
        does from then on needs none of it, and Redis has the message.
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
