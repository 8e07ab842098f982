"""The message of a call in a form that can be stored and published again unchanged."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Self

from nekro.broker.delivery.task_messages import TaskMessage, signed_message
from nekro.broker.tracing import trace_headers
from nekro.wire.invocation import Invocation, Signer
from nekro.wire.seal import Seal
from nekro_agent.durations import GRACE_SECONDS
from nekro_agent.errors import MessageRefusedError
from nekro_agent.shared_clock import shared_time

if TYPE_CHECKING:
    from broker_config.app import NekroApp

__all__ = ["CallMessage"]


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
