"""One call as it travels, so that whoever finds it lost can send the very same message again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final, Self

from celery import Celery

from broker_config.wire import Invocation, Signer
from nekro_agent.errors import MessageRefusedError
from nekro_agent.shared_clock import shared_time

__all__ = ["CallMessage"]

#: Extra time, beyond the deadline, after which a worker gives a call up for good.
HARD_LIMIT_GRACE_SECONDS: Final = 5


@dataclass(frozen=True, kw_only=True)
class CallMessage:
    """A signed call with the way that it takes."""

    invocation: Invocation
    #: What ``Signer.sign`` made of it.
    body: dict[str, Any]
    #: Name of its queue.
    lane: str
    #: The ``MethodCaller`` that waits for its result; None when nobody does.
    reply_to: str | None

    @classmethod
    def of(cls, invocation: Invocation, *, signer: Signer, lane: str, reply_to: str | None) -> Self:
        """Sign a call."""
        return cls(invocation=invocation, body=signer.sign(invocation), lane=lane, reply_to=reply_to)

    def to_row(self) -> dict[str, Any]:
        """As JSON data for the call's row."""
        return {**self.body, "lane": self.lane, "reply_to": self.reply_to}

    @classmethod
    def from_row(cls, stored: Mapping[str, Any], *, signer: Signer) -> Self:
        """Read what ``to_row`` wrote.

        Raises:
            MessageRefusedError: it is something else, or was signed with another key.
        """
        body = {name: stored.get(name) for name in ("invocation", "signature")}
        lane, reply_to = stored.get("lane"), stored.get("reply_to")
        if not isinstance(lane, str) or not isinstance(reply_to, str | None):
            raise MessageRefusedError("the call's row does not hold its message")
        return cls(invocation=signer.verify(body), body=body, lane=lane, reply_to=reply_to)

    @classmethod
    def renewed(cls, invocation: Invocation, *, signer: Signer, lane: str, timeout_seconds: float) -> Self:
        """Sign a call of the past again, as if it was made now; nobody waits for its result."""
        now = shared_time()
        times = {"issued_at": now, "deadline": now + timedelta(seconds=timeout_seconds)}
        return cls.of(invocation.model_copy(update=times), signer=signer, lane=lane, reply_to=None)

    def build(self, app: Celery) -> Any:
        """Make Celery's message of it, with the time limits that are left now.

        It does not expire by Celery's means: the worker's executor looks at the signed deadline anyway.
        """
        remaining = max(0.0, self.invocation.remaining_seconds())
        return app.amqp.signed_task(
            self.invocation.call_id,
            self.invocation.method,
            [self.body],
            queue=self.lane,
            soft_time_limit=remaining,
            time_limit=remaining + HARD_LIMIT_GRACE_SECONDS,
            reply_to=self.reply_to,
        )
