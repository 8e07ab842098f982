"""Task messages: signed, and without Celery, whose import takes longer than a call.

Every task message of the application is built here in the form of Celery's protocol 2, with the signature
that ``nekro.broker.celery.tasks`` verifies. Celery copies a representation of a task's arguments to the
message's headers, and from there to events (Flower), log lines and ``inspect`` replies; here each of these
copies is a placeholder. ``CallMessage`` is the message of a call in a form that can be stored and published
again unchanged.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self

from broker_config.keys import is_caller_id
from nekro.broker.tracing import trace_headers
from nekro.wire.invocation import Invocation, Signer
from nekro.wire.seals import Seal
from nekro_agent.durations import GRACE_SECONDS
from nekro_agent.errors import MessageRefusedError
from nekro_agent.shared_clock import shared_time

if TYPE_CHECKING:
    from broker_config.app import NekroApp

__all__ = [
    "HIDDEN",
    "SIGNATURE_HEADER",
    "CallMessage",
    "TaskMessage",
    "signed_fields",
    "signed_message",
]

SIGNATURE_HEADER: Final = "x-nekro-signature"
#: Placeholder for arguments in places where Celery would show them.
HIDDEN: Final = "(hidden)"

_canonical = json.JSONEncoder(sort_keys=True, separators=(",", ":"), allow_nan=False).encode


class TaskMessage(NamedTuple):
    """A task message; the fields and their order are those of ``celery.app.amqp.task_message``."""

    headers: dict[str, Any]
    properties: dict[str, Any]
    body: tuple[Sequence[Any], dict[str, Any], dict[str, Any]]
    sent_event: None = None


def signed_message(
    seal: Seal,
    task_id: str,
    name: str,
    args: Sequence[Any],
    *,
    queue: str,
    reply_to: str | None = None,
    time_limit: float | None = None,
    soft_time_limit: float | None = None,
) -> TaskMessage:
    """Build a task message, signed for one queue.

    Args:
        args: plain JSON data.
        reply_to: id of the waiting ``MethodCaller``; None, or any other string, means that none waits.
        time_limit: in seconds, as the soft limit; None means the task's own limit.

    Raises:
        TypeError, ValueError: the arguments are not plain JSON.
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
    headers[SIGNATURE_HEADER] = seal.sign(signed_fields(headers, queue=queue, reply_to=caller, args=args))
    properties = {"correlation_id": task_id, "reply_to": caller}
    return TaskMessage(headers=headers, properties=properties, body=(args, {}, {}))


def signed_fields(headers: Mapping[str, Any], *, queue: str, reply_to: str, args: Sequence[Any]) -> list[str]:
    """Return the fields of a task message that its signature covers.

    Args:
        headers: with ``task``, ``id`` and ``timelimit``.
        queue: name of the queue that the message is for.
        reply_to: id of the waiting caller; empty when no caller waits for the result.

    Raises:
        TypeError, ValueError: the arguments are not plain JSON.
    """
    return [
        str(headers["task"]),
        str(headers["id"]),
        queue,
        reply_to,
        repr(headers["timelimit"]),
        _content(args),
    ]


def _content(args: Sequence[Any]) -> str:
    if len(args) == 1 and type(args[0]) is dict:
        body = args[0]
        signature = body.get("signature")
        if len(body) == 2 and type(signature) is str and "invocation" in body:
            return f"invocation {signature}"
    return f"arguments {_canonical(args)}"


@dataclass(frozen=True, kw_only=True)
class CallMessage:
    """A signed call with its queue and its reply address."""

    invocation: Invocation
    #: The signed invocation, as returned by ``Signer.sign``.
    body: dict[str, Any]
    #: Name of its queue.
    lane: str
    #: Id of the ``MethodCaller`` that waits for its result; None when none waits.
    reply_to: str | None
    #: Headers of the trace in which it was made; empty while tracing is off.
    trace: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        invocation: Invocation,
        *,
        signer: Signer,
        lane: str,
        reply_to: str | None,
        trace: Mapping[str, str] | None = None,
    ) -> Self:
        """Sign a call.

        Args:
            trace: headers of an earlier trace that it continues; None: the current trace.
        """
        return cls(
            invocation=invocation,
            body=signer.sign(invocation),
            lane=lane,
            reply_to=reply_to,
            trace=trace_headers() if trace is None else trace,
        )

    def to_row(self) -> dict[str, Any]:
        """Return JSON data for the call's row."""
        row = {**self.body, "lane": self.lane, "reply_to": self.reply_to}
        return {**row, "trace": dict(self.trace)} if self.trace else row

    @classmethod
    def from_row(cls, stored: Mapping[str, Any], *, signer: Signer) -> Self:
        """Read what ``to_row`` wrote.

        Raises:
            MessageRefusedError: it is malformed, or was signed with another key.
        """
        body = {name: stored.get(name) for name in ("invocation", "signature")}
        lane, reply_to = stored.get("lane"), stored.get("reply_to")
        if not isinstance(lane, str) or not isinstance(reply_to, str | None):
            raise MessageRefusedError("the call's row does not contain its message")
        trace = stored.get("trace")
        return cls(
            invocation=signer.verify(body),
            body=body,
            lane=lane,
            reply_to=reply_to,
            trace=trace if isinstance(trace, dict) else {},
        )

    @classmethod
    def renewed(cls, invocation: Invocation, *, signer: Signer, lane: str, timeout_seconds: float) -> Self:
        """Sign an earlier call again with new times; no caller waits for its result."""
        now = shared_time()
        times = {"issued_at": now, "deadline": now + timedelta(seconds=timeout_seconds)}
        return cls.of(invocation.model_copy(update=times), signer=signer, lane=lane, reply_to=None)

    def build(self, app: NekroApp) -> TaskMessage:
        """Build Celery's message with the application's seal; see ``sealed``."""
        return self.sealed(app.task_seal)

    def sealed(self, seal: Seal) -> TaskMessage:
        """Build Celery's message, with the time limits that remain now.

        It does not use Celery's ``expires``, because the worker's handler checks the signed deadline.
        """
        remaining = max(0.0, self.invocation.remaining_seconds())
        message = signed_message(
            seal,
            self.invocation.call_id,
            self.invocation.method,
            [self.body],
            queue=self.lane,
            soft_time_limit=remaining,
            time_limit=remaining + GRACE_SECONDS,
            reply_to=self.reply_to,
        )
        message.headers.update(self.trace)
        return message
