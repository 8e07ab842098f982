"""Builds signed task messages of Celery's protocol 2 without Celery, whose import takes longer than a call.

Every task message of the application is built here, with the signature that ``nekro.broker.celery.admission``
verifies. Celery copies a representation of a task's arguments to the message's headers, and from there to
events (Flower), log lines and ``inspect`` replies; here each of these copies is a placeholder.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from broker_config.keys import is_caller_id
from nekro.wire.seal import Seal

__all__ = ["HIDDEN", "SIGNATURE_HEADER", "TaskMessage", "signed_fields", "signed_message"]

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
