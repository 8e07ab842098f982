"""The requests of turns, jobs, approvals, timers, dead letters and keys."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Literal

from pydantic import JsonValue

from nekro_client.models import (
    ApiKey,
    Approval,
    Call,
    CreatedKey,
    DeadLetter,
    DecisionBody,
    Job,
    JobLog,
    KeyBody,
    KeyScope,
    Page,
    ReplayedTurn,
    ReplayTurnBody,
    RetryBody,
    SignalBody,
    Timer,
    TimerBody,
    Turn,
    TurnState,
    TurnSummary,
)
from nekro_client.operations import Operation, operation, segment
from nekro_client.requests import request, whole_list

__all__ = [
    "ApprovalRequests",
    "DeadLetterRequests",
    "JobRequests",
    "KeyRequests",
    "TimerRequests",
    "TurnRequests",
]


class TurnRequests:
    """The requests of turns."""

    @request
    def list(
        self,
        *,
        state: TurnState | None = None,
        since: datetime | None = None,
        until: datetime | None = None,
        model: str | None = None,
        plugin: str | None = None,
        min_cost: float | None = None,
        beginning: str = "",
        cursor: str | None = None,
        limit: int | None = None,
    ) -> Operation[Page[TurnSummary]]:
        """Return a page of the turns of all chats that the key has, the newest first.

        A page may be short, or empty, and have a next one.

        Args:
            since, until: only turns that were requested then or later, and before.
            model: only turns that this model answered in.
            plugin: only turns that called methods of this plugin.
            min_cost: only ended turns whose rounds cost at least that.
            beginning: only turns whose ids begin with it.
        """
        wanted = {"state": state, "model": model, "plugin": plugin, "min_cost": min_cost}
        times = {"since": since and since.isoformat(), "until": until and until.isoformat()}
        params = {**wanted, **times, "id": beginning or None, "cursor": cursor, "limit": limit}
        return operation("GET", "/turns", Page[TurnSummary], params=params)

    @request
    def get(self, turn_id: str, *, with_values: bool = True, with_prompts: bool = False) -> Operation[Turn]:
        """Return a turn with its rounds, calls, messages and jobs.

        Args:
            with_values: False leaves out arguments and results of calls; ``call`` returns them for one.
            with_prompts: also what was sent to the model, where that is kept; needs the scope ``admin``.
        """
        params = {"values": None if with_values else False, "prompts": with_prompts or None}
        return operation("GET", f"/turns/{segment(turn_id)}", Turn, params=params)

    @request
    def call(self, turn_id: str, call_id: str) -> Operation[Call]:
        """Return a call of a turn, with its arguments and its result."""
        return operation("GET", f"/turns/{segment(turn_id)}/calls/{segment(call_id)}", Call)

    @request
    def replay(
        self,
        turn_id: str,
        *,
        chat_key: str | None = None,
        call_id: str | None = None,
        idempotency_key: str | None = None,
    ) -> Operation[ReplayedTurn]:
        """Run a turn again in a new chat with the turn's history; the old chat stays as it is.

        Args:
            chat_key: a chat that does not exist; None lets the gateway name one.
            call_id: go on from this call, with the recorded answers of those before it; None: ask the model.

        Raises:
            ConflictError: the chat exists, no person's message caused the turn, or its programs cannot be run
                again.
        """
        path = f"/turns/{segment(turn_id)}/replay"
        body = ReplayTurnBody(chat_key=chat_key, call_id=call_id)
        return operation("POST", path, ReplayedTurn, body=body, idempotency_key=idempotency_key)

    @request
    def cancel(self, turn_id: str) -> Operation[Turn]:
        """Stop a turn; returns it as it is then, which may be still running."""
        return operation("POST", f"/turns/{segment(turn_id)}/cancel", Turn)


class JobRequests:
    """The requests of jobs."""

    @request
    def list(
        self,
        *,
        chat_key: str | None = None,
        open_only: bool = False,
        beginning: str = "",
        cursor: str | None = None,
        limit: int | None = None,
    ) -> Operation[Page[Job]]:
        """Return a page of jobs, the newest first; ``beginning`` is one of their ids."""
        wanted = {"chat_key": chat_key, "open": open_only or None, "id": beginning or None}
        params = {**wanted, "cursor": cursor, "limit": limit}
        return operation("GET", "/jobs", Page[Job], params=params)

    @request
    def get(self, job_id: str) -> Operation[Job]:
        """Return a job."""
        return operation("GET", f"/jobs/{segment(job_id)}", Job)

    @request
    def cancel(self, job_id: str) -> Operation[Job]:
        """Ask a job to end; returns it as it is then."""
        return operation("POST", f"/jobs/{segment(job_id)}/cancel", Job)

    @request
    def log(self, job_id: str) -> Operation[JobLog]:
        """Return the attempts at a job, its reports, and what its code logged."""
        return operation("GET", f"/jobs/{segment(job_id)}/log", JobLog)

    @request
    def retry(self, job_id: str, *, idempotency_key: str | None = None) -> Operation[Job]:
        """Start a job that failed or was cancelled again; returns the new job.

        Raises:
            ConflictError: it cannot be started again, or a job of its name is open.
        """
        path = f"/jobs/{segment(job_id)}/retry"
        return operation("POST", path, Job, idempotency_key=idempotency_key)

    @request
    def signal(self, job_id: str, key: str, data: JsonValue = None) -> Operation[Job]:
        """Pass data to the job's ``wait(key)``, now or when it waits; what a key means is up to the plugin.

        Raises:
            ConflictError: the job has ended.
        """
        return operation("POST", f"/jobs/{segment(job_id)}/signals", Job, body=SignalBody(key=key, data=data))


class ApprovalRequests:
    """The requests of approvals."""

    @request
    def list(
        self,
        *,
        chat_key: str | None = None,
        state: str | None = None,
        beginning: str = "",
        cursor: str | None = None,
        limit: int | None = None,
    ) -> Operation[Page[Approval]]:
        """Return a page of requests, the newest first, each call on one line (``summary``).

        Args:
            state: ``pending``, ``approved``, ``denied``, ``expired`` or ``cancelled``; None means all.
            beginning: only the request of this number, else those whose ids begin with it.
        """
        wanted = {"chat_key": chat_key, "state": state, "id": beginning or None}
        params = {**wanted, "cursor": cursor, "limit": limit}
        return operation("GET", "/approvals", Page[Approval], params=params)

    @request
    def get(self, approval_id: str) -> Operation[Approval]:
        """Return a request with the call as it would run."""
        return operation("GET", f"/approvals/{segment(approval_id)}", Approval)

    @request
    def approve(
        self,
        approval_id: str,
        *,
        scope: Literal["once", "turn", "chat"] = "once",
        reason: str | None = None,
        args: Sequence[JsonValue] | None = None,
        kwargs: Mapping[str, JsonValue] | None = None,
    ) -> Operation[Approval]:
        """Let a call run.

        Args:
            scope: what else it permits: further calls of the method in the same turn or chat.
            args, kwargs: replace the arguments; both None keep them.

        Raises:
            ConflictError: the call was decided already; the error names the first decision.
        """
        body = DecisionBody(
            decision="approve",
            scope=scope,
            reason=reason,
            args=None if args is None else [*args],
            kwargs=None if kwargs is None else dict(kwargs),
        )
        return _decision(approval_id, body)

    @request
    def deny(self, approval_id: str, *, reason: str | None = None) -> Operation[Approval]:
        """Refuse a call.

        Raises:
            ConflictError: the call was decided already; the error names the first decision.
        """
        return _decision(approval_id, DecisionBody(decision="deny", reason=reason))

    @request
    def revoke(self, approval_id: str) -> Operation[Approval]:
        """End what an approval for a turn or a chat permits."""
        return operation("POST", f"/approvals/{segment(approval_id)}/revoke", Approval)


class TimerRequests:
    """The requests of timers."""

    @request
    def list(
        self,
        *,
        chat_key: str | None = None,
        beginning: str = "",
        cursor: str | None = None,
        limit: int | None = None,
    ) -> Operation[Page[Timer]]:
        """Return a page of timers; ``beginning`` is one of their ids."""
        params = {"chat_key": chat_key, "id": beginning or None, "cursor": cursor, "limit": limit}
        return operation("GET", "/timers", Page[Timer], params=params)

    @request
    def pause(self, timer_id: str) -> Operation[Timer]:
        """Keep a timer from firing."""
        return operation("PATCH", f"/timers/{segment(timer_id)}", Timer, body=TimerBody(state="paused"))

    @request
    def resume(self, timer_id: str) -> Operation[Timer]:
        """Let a paused timer fire again."""
        return operation("PATCH", f"/timers/{segment(timer_id)}", Timer, body=TimerBody(state="waiting"))

    @request
    def delete(self, timer_id: str) -> Operation[Timer]:
        """Delete a timer; returns what it was."""
        return operation("DELETE", f"/timers/{segment(timer_id)}", Timer)


class DeadLetterRequests:
    """The requests of dead letters."""

    @request
    def list(
        self, *, beginning: str = "", cursor: str | None = None, limit: int | None = None
    ) -> Operation[Page[DeadLetter]]:
        """Return a page of dead letters, the newest first.

        Args:
            beginning: only those whose ids begin with it; then a page may be short, or empty, and have a
                next one.
        """
        params = {"id": beginning or None, "cursor": cursor, "limit": limit}
        return operation("GET", "/dead-letters", Page[DeadLetter], params=params)

    @request
    def get(self, letter_id: str) -> Operation[DeadLetter]:
        """Return a dead letter after its signatures were checked."""
        return operation("GET", f"/dead-letters/{segment(letter_id)}", DeadLetter)

    @request
    def retry(self, letter_id: str, *, timeout_seconds: float | None = None) -> Operation[DeadLetter]:
        """Send a dead letter again under its id.

        Args:
            timeout_seconds: how long the call may take, from now; None keeps its deadline.
        """
        body = RetryBody(timeout_seconds=timeout_seconds)
        return operation("POST", f"/dead-letters/{segment(letter_id)}/retry", DeadLetter, body=body)

    @request
    def drop(self, letter_id: str) -> Operation[None]:
        """Delete a dead letter."""
        return operation("DELETE", f"/dead-letters/{segment(letter_id)}", None)


class KeyRequests:
    """The requests of keys."""

    @request
    def create(
        self,
        *,
        scopes: Sequence[KeyScope],
        name: str,
        chats: str = "*",
        user_id: str | None = None,
        requests_per_minute: int | None = None,
        cost_per_day: float | None = None,
        tokens_per_day: int | None = None,
        stored_bytes_limit: int | None = None,
        expires_at: datetime | None = None,
    ) -> Operation[CreatedKey]:
        """Create a key; its text is in the answer only."""
        body = KeyBody(
            scopes=[*scopes],
            name=name,
            chats=chats,
            user_id=user_id,
            requests_per_minute=requests_per_minute,
            cost_per_day=cost_per_day,
            tokens_per_day=tokens_per_day,
            stored_bytes_limit=stored_bytes_limit,
            expires_at=expires_at,
        )
        return operation("POST", "/keys", CreatedKey, body=body)

    @whole_list
    def list(self) -> Operation[Page[ApiKey]]:
        """Return all keys, also revoked ones."""
        return operation("GET", "/keys", Page[ApiKey])

    @request
    def revoke(self, key_id: str) -> Operation[ApiKey]:
        """End a key at once; returns it."""
        return operation("DELETE", f"/keys/{segment(key_id)}", ApiKey)


def _decision(approval_id: str, body: DecisionBody) -> Operation[Approval]:
    return operation("POST", f"/approvals/{segment(approval_id)}/decision", Approval, body=body)
