"""Turns, jobs, approvals, timers, dead letters and keys."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Literal

from pydantic import JsonValue

from nekro_client import endpoints
from nekro_client.bodies import approval_body, key_body
from nekro_client.chats import Chat, EventStream
from nekro_client.connections import Connection
from nekro_client.models import (
    ApiKey,
    Approval,
    Call,
    CreatedKey,
    DeadLetter,
    DecisionBody,
    Job,
    KeyScope,
    Page,
    ReplayedTurn,
    ReplayTurnBody,
    RetryBody,
    SignalBody,
    Timer,
    TimerBody,
    Turn,
)
from nekro_client.streams import TurnWait

__all__ = ["Approvals", "DeadLetters", "Jobs", "Keys", "Timers", "Turns"]


class Turns:
    """What messages, calls, timers and jobs caused."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def get(self, turn_id: str, *, with_values: bool = True) -> Turn:
        """Return a turn with its rounds, calls, messages and jobs.

        Args:
            with_values: False leaves out arguments and results of calls; ``call`` returns them for one.
        """
        return self._connection.send(endpoints.get_turn(turn_id, with_values=with_values))

    def call(self, turn_id: str, call_id: str) -> Call:
        """Return a call of a turn, with its arguments and its result."""
        return self._connection.send(endpoints.get_turn_call(turn_id, call_id))

    def replay(
        self, turn_id: str, *, chat_key: str | None = None, idempotency_key: str | None = None
    ) -> ReplayedTurn:
        """Run a turn again in a new chat with the turn's history; the old chat stays as it is.

        Args:
            chat_key: a chat that does not exist; None lets the gateway name one.

        Raises:
            ConflictError: the chat exists, or no person's message caused the turn.
        """
        body = ReplayTurnBody(chat_key=chat_key)
        return self._connection.send(endpoints.replay_turn(turn_id, body, idempotency_key=idempotency_key))

    def cancel(self, turn_id: str) -> Turn:
        """Stop a turn; returns it as it is then, which may be still running."""
        return self._connection.send(endpoints.cancel_turn(turn_id))

    def wait(self, turn_id: str, *, timeout_seconds: float | None = None) -> Turn:
        """Return a turn when it has ended, as the chat's event stream shows.

        Raises:
            WaitTimeoutError: it has not after ``timeout_seconds``; None waits without end.
        """
        wait = TurnWait(turn_id, timeout_seconds=timeout_seconds)
        turn = self.get(turn_id)
        while not wait.is_over(turn):
            if wait.position is None:
                wait.position = Chat(self._connection, turn.chat_key).last_event_number()
            else:
                self._wait_for_end_event(wait, turn)
            turn = self.get(turn_id)
        return turn

    def _wait_for_end_event(self, wait: TurnWait, turn: Turn) -> None:
        with EventStream(self._connection.http, wait.cursor(turn)) as events:
            for event in events:
                if event.turn_id == wait.turn_id:
                    return


class Jobs:
    """Background jobs of plugins."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def list(
        self,
        *,
        chat_key: str | None = None,
        open_only: bool = False,
        cursor: str | None = None,
        limit: int | None = None,
    ) -> Page[Job]:
        """Return a page of jobs, the newest first."""
        return self._connection.send(
            endpoints.list_jobs(chat_key=chat_key, open_only=open_only, cursor=cursor, limit=limit)
        )

    def get(self, job_id: str) -> Job:
        """Return a job."""
        return self._connection.send(endpoints.get_job(job_id))

    def cancel(self, job_id: str) -> Job:
        """Ask a job to end; returns it as it is then."""
        return self._connection.send(endpoints.cancel_job(job_id))

    def signal(self, job_id: str, key: str, data: JsonValue = None) -> Job:
        """Pass data to the job's ``wait(key)``, now or when it waits; what a key means is up to the plugin.

        Raises:
            ConflictError: the job has ended.
        """
        return self._connection.send(endpoints.signal_job(job_id, SignalBody(key=key, data=data)))


class Approvals:
    """Calls that wait for approval, and decisions on them."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def list(
        self,
        *,
        chat_key: str | None = None,
        state: str | None = None,
        cursor: str | None = None,
        limit: int | None = None,
    ) -> Page[Approval]:
        """Return a page of requests, the newest first, without their arguments.

        Args:
            state: ``pending``, ``approved``, ``denied``, ``expired`` or ``cancelled``; None means all.
        """
        return self._connection.send(
            endpoints.list_approvals(chat_key=chat_key, state=state, cursor=cursor, limit=limit)
        )

    def get(self, approval_id: str) -> Approval:
        """Return a request with the call as it would run."""
        return self._connection.send(endpoints.get_approval(approval_id))

    def approve(
        self,
        approval_id: str,
        *,
        scope: Literal["once", "turn", "chat"] = "once",
        reason: str | None = None,
        args: Sequence[JsonValue] | None = None,
        kwargs: Mapping[str, JsonValue] | None = None,
    ) -> Approval:
        """Let a call run.

        Args:
            scope: what else it permits: further calls of the method in the same turn or chat.
            args, kwargs: replace the arguments; both None keep them.

        Raises:
            ConflictError: the call was decided already; the error names the first decision.
        """
        body = approval_body(scope, reason, args, kwargs)
        return self._connection.send(endpoints.decide_approval(approval_id, body))

    def deny(self, approval_id: str, *, reason: str | None = None) -> Approval:
        """Refuse a call.

        Raises:
            ConflictError: the call was decided already; the error names the first decision.
        """
        body = DecisionBody(decision="deny", reason=reason)
        return self._connection.send(endpoints.decide_approval(approval_id, body))

    def revoke(self, approval_id: str) -> Approval:
        """End what an approval for a turn or a chat permits."""
        return self._connection.send(endpoints.revoke_approval(approval_id))


class Timers:
    """Timers of chats that have not ended."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def list(
        self, *, chat_key: str | None = None, cursor: str | None = None, limit: int | None = None
    ) -> Page[Timer]:
        """Return a page of timers."""
        return self._connection.send(endpoints.list_timers(chat_key=chat_key, cursor=cursor, limit=limit))

    def pause(self, timer_id: str) -> Timer:
        """Keep a timer from firing."""
        return self._connection.send(endpoints.change_timer(timer_id, TimerBody(state="paused")))

    def resume(self, timer_id: str) -> Timer:
        """Let a paused timer fire again."""
        return self._connection.send(endpoints.change_timer(timer_id, TimerBody(state="waiting")))

    def delete(self, timer_id: str) -> Timer:
        """Delete a timer; returns what it was."""
        return self._connection.send(endpoints.delete_timer(timer_id))


class DeadLetters:
    """Messages that workers could not process."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def list(self, *, cursor: str | None = None, limit: int | None = None) -> Page[DeadLetter]:
        """Return a page of dead letters, the newest first."""
        return self._connection.send(endpoints.list_dead_letters(cursor=cursor, limit=limit))

    def get(self, letter_id: str) -> DeadLetter:
        """Return a dead letter after its signatures were checked."""
        return self._connection.send(endpoints.get_dead_letter(letter_id))

    def retry(self, letter_id: str, *, timeout_seconds: float | None = None) -> DeadLetter:
        """Send a dead letter again under its id.

        Args:
            timeout_seconds: how long the call may take, from now; None keeps its deadline.
        """
        body = RetryBody(timeout_seconds=timeout_seconds)
        return self._connection.send(endpoints.retry_dead_letter(letter_id, body))

    def drop(self, letter_id: str) -> None:
        """Delete a dead letter."""
        self._connection.send(endpoints.drop_dead_letter(letter_id))


class Keys:
    """Keys of the API; for keys with the scope admin."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

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
        expires_at: datetime | None = None,
    ) -> CreatedKey:
        """Create a key; its text is in the answer only."""
        body = key_body(
            scopes, name, chats, user_id, requests_per_minute, cost_per_day, tokens_per_day, expires_at
        )
        return self._connection.send(endpoints.create_key(body))

    def list(self) -> list[ApiKey]:
        """Return all keys, also revoked ones."""
        return self._connection.send(endpoints.list_keys()).items

    def revoke(self, key_id: str) -> ApiKey:
        """End a key at once; returns it."""
        return self._connection.send(endpoints.revoke_key(key_id))
