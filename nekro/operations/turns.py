"""Turns as trees, from rows and events, their cancellation, and the rounds of a chat."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from nekro.app.chats.writer import trace_of
from nekro.app.rounds.runs import listed_calls
from nekro.broker.tracing import recorded_trace_id
from nekro.operations.actor import Actor, Scope
from nekro.operations.chats import message_answer, require_chat
from nekro.operations.pages import Cursor, Limit, answer_of, number_of, page_of
from nekro.operations.turn_states import RoundEvents, TurnEnd, awaited, awaited_calls, by_round, turn_cause
from nekro.operations.work import job_answer
from nekro.sandbox.models import StopType
from nekro_agent.durations import CLOSE_STEP_SECONDS
from nekro_agent.errors import NotFoundError
from nekro_agent.methods import SandboxMethodType
from nekro_client import models
from nekro_client.event_types import STARTS_OF_ATTEMPTS, EventType
from nekro_client.models import Page, TurnError
from storage.engine import Database
from storage.repositories.base import found
from storage.repositories.calls import Call
from storage.repositories.events import ChatEvent
from storage.repositories.jobs import Job
from storage.repositories.rounds import Round
from storage.states import TriggerKind
from storage.transaction import Transaction

if TYPE_CHECKING:
    from nekro.app.services import Services

__all__ = [
    "cancel_turn",
    "first_round",
    "get_call",
    "get_turn",
    "list_rounds",
    "read_rounds",
    "read_turn",
]

#: A call of ``nekro.app.rounds.runs``, and its row; None for a call without one, such as a TOOL's.
_ListedCall: TypeAlias = tuple[dict[str, Any], Call | None]


#: Fields of a turn that only a key which may read the chat sees.
_NO_CONTENT: Final[dict[str, Any]] = {
    "error": None,
    "rounds": [],
    "messages": [],
    "jobs": [],
    "following": [],
}


async def get_turn(
    actor: Actor, turn_id: str, *, with_values: bool = True, with_prompts: bool = False
) -> models.Turn:
    """Return a turn: rounds with requests, code, output and calls; messages; jobs."""
    await first_round(actor, turn_id, Scope.READ)
    if with_prompts:
        actor.identity.require(Scope.ADMIN)
    return await read_turn(actor.services, turn_id, with_values=with_values, with_prompts=with_prompts)


async def cancel_turn(actor: Actor, turn_id: str) -> models.Turn:
    """Cancel the waiting and running rounds of a turn, and only of that one; returns it as it is then.

    Calls of the turn that wait for approval are withdrawn, and a turn that waited for them is then cancelled,
    although its rounds have ended. A running round whose worker
    does not answer within seconds ends later. A turn that has ended, or that a round of another turn answers,
    stays as it is. A key without the scope `read` gets its state and times only.
    """
    first = await first_round(actor, turn_id, Scope.POST)

    async def work() -> models.Turn:
        await actor.services.stopper.stop(
            first.chat_key,
            reason="cancelled on request",
            wait_seconds=CLOSE_STEP_SECONDS,
            turn_id=turn_id,
        )
        turn = await read_turn(actor.services, turn_id)
        return turn if Scope.READ in actor.identity.scopes else turn.model_copy(update=_NO_CONTENT)

    return await actor.once.run(models.Turn, work)


async def first_round(actor: Actor, turn_id: str, scope: Scope) -> Round:
    """Return the first round of a turn, whose id is the turn's.

    Raises:
        NotFoundError: there is no such turn, or it is of a chat that the key does not have.
        RefusedError: the key lacks the scope.
    """
    actor.identity.require(scope)
    async with actor.services.database.read() as transaction:
        first = await transaction.rounds.find(turn_id)
    if first is None or first.turn_id != turn_id or not actor.identity.has_chat(first.chat_key):
        raise NotFoundError(f"there is no turn {turn_id!r}")
    return first


async def read_turn(
    services: Services, turn_id: str, *, with_values: bool = True, with_prompts: bool = False
) -> models.Turn:
    """Return a turn with everything that is recorded of it.

    The rounds are its own, and those of other turns that took in its rounds.

    Args:
        with_values: False leaves out the arguments and results of calls; a turn may have thousands.
        with_prompts: also what was sent to the model, where that is kept.

    Raises:
        NotFoundError: there is no such turn.
    """
    async with services.database.read() as transaction:
        # Before the rounds, which end in the same transaction: a turn that is over has no open rounds here.
        end = await transaction.events.end_of_turn(turn_id)
        rounds, takers = await _rounds(transaction, turn_id)
        first = found(next((item for item in rounds if item.id == turn_id), None), "turn", turn_id)
        events = await transaction.events.of_turn(turn_id)
        for other in {taker.turn_id for taker in takers} - {turn_id}:
            events += await transaction.events.of_turn(other)
        messages = await transaction.messages.of_turn(turn_id)
        jobs = await transaction.jobs.of_turn(turn_id)
        shown = {item.id: item for item in (*rounds, *takers)}
        ordered = sorted(shown.values(), key=lambda item: item.sequence)
        calls = {item.id: await _calls(transaction, item) for item in ordered}
        kept = await transaction.prompts.kept(list(shown))
        prompts = await transaction.prompts.of_rounds(kept) if with_prompts and kept else {}
        cause = await _cause(transaction, first)
        following = await _following(transaction, turn_id, calls.values(), jobs)
        approvals = await transaction.approvals.states(awaited(end))
        waits = await transaction.parked_programs.states(awaited_calls(end))
    of_round = by_round(events)
    turn = TurnEnd(rounds, takers, end, approvals, waits)
    trace_id = recorded_trace_id(trace_of(first))
    return models.Turn(
        id=turn_id,
        chat_key=first.chat_key,
        state=turn.state,
        waits_for=turn.waits_for,
        waits=turn.waits,
        cause=cause,
        merged_into=next((taker.turn_id for taker in takers), None),
        trace_id=trace_id,
        trace_url=None if trace_id is None else services.settings.tracing.url_of(trace_id),
        requested_at=first.requested_at,
        started_at=turn.started_at,
        finished_at=turn.finished_at,
        error=turn.error,
        rounds=[
            _round(
                item, calls[item.id], RoundEvents(of_round.get(item.id, ())), with_values=with_values
            ).model_copy(update={"prompt_kept": item.id in kept, "prompt": _prompt(prompts.get(item.id))})
            for item in ordered
        ],
        messages=[message_answer(item, services.file_ids) for item in messages],
        jobs=[job_answer(item) for item in jobs],
        following=following,
    )


async def get_call(actor: Actor, turn_id: str, call_id: str) -> models.Call:
    """Return a call of a turn, with its arguments and its result."""
    await first_round(actor, turn_id, Scope.READ)
    async with actor.services.database.read() as transaction:
        rounds, takers = await _rounds(transaction, turn_id)
        for item in (*rounds, *takers):
            events = await transaction.events.of_turn(item.turn_id, call_id=call_id)
            events += await transaction.events.of_turn(item.turn_id, types=STARTS_OF_ATTEMPTS)
            events.sort(key=lambda event: event.number)
            own = RoundEvents([event for event in events if event.round_id == item.id])
            known = _known(await _calls(transaction, item, call_id=call_id), own)
            if call_id in known:
                return _call(*known[call_id], item, own, with_values=True)
    raise NotFoundError(f"turn {turn_id!r} has no call {call_id!r}")


async def list_rounds(
    actor: Actor, chat_key: str, limit: Limit = 50, cursor: Cursor = None
) -> Page[models.Round]:
    """List the rounds of a chat, the newest first; their calls have no arguments and values."""
    actor.identity.require(Scope.READ, chat_key=chat_key)
    before = None if cursor is None else number_of(cursor)
    async with actor.services.database.read() as transaction:
        await require_chat(transaction, chat_key)
    found = await read_rounds(actor.services.database, chat_key, limit=limit + 1, before=before)
    return page_of(found, limit=limit, answer=lambda one: one[1], position=lambda one: one[0])


async def read_rounds(
    database: Database, chat_key: str, *, limit: int, before: int | None
) -> list[tuple[int, models.Round]]:
    """Return the newest rounds of a chat, the newest first, each with its position among all rounds.

    Their calls are without arguments and values, which the turn's tree has.

    Args:
        before: only rounds with a smaller position; None does not limit.
    """
    async with database.read() as transaction:
        rows = await transaction.rounds.newest(chat_key, limit=limit, before=before)
        found = [
            (row.sequence, _round(row, await _calls(transaction, row), RoundEvents(()), with_values=False))
            for row in rows
        ]
    return found[::-1]


async def _rounds(transaction: Transaction, turn_id: str) -> tuple[list[Round], list[Round]]:
    """Return the rounds of a turn, and the rounds that took in some of them."""
    rounds = [item for item in await transaction.rounds.rounds_of_turns(turn_id) if item.turn_id == turn_id]
    return rounds, [await transaction.rounds.get(item.merged_into) for item in rounds if item.merged_into]


async def _cause(transaction: Transaction, first: Round) -> models.TurnCause:
    """Return what caused a turn, with the turn in which that happened."""
    turn_id: str | None = None
    if first.trigger_kind is TriggerKind.CALL:
        call = await transaction.calls.find(first.trigger_id)
        before = (
            None if call is None or call.round_id is None else await transaction.rounds.find(call.round_id)
        )
        turn_id = None if before is None else before.turn_id
    elif first.trigger_kind is TriggerKind.JOB:
        job = await transaction.jobs.find(first.trigger_id)
        turn_id = None if job is None else job.turn_id
    return turn_cause(first).model_copy(update={"turn_id": turn_id})


async def _following(
    transaction: Transaction, turn_id: str, calls: Iterable[Sequence[_ListedCall]], jobs: Sequence[Job]
) -> list[str]:
    """Return the turns that began with an approved or detached call, or a job, of a turn."""
    late = [
        row.id
        for of_round in calls
        for call, row in of_round
        if row is not None and (row.detached_at is not None or call.get("approval_id") is not None)
    ]
    listing = transaction.turn_listing
    found = await listing.caused(TriggerKind.CALL, late)
    found += await listing.caused(TriggerKind.JOB, [job.id for job in jobs])
    return sorted({item.turn_id for item in found} - {turn_id})


async def _calls(transaction: Transaction, item: Round, *, call_id: str | None = None) -> list[_ListedCall]:
    """Return the calls of a round, and their rows where they have some.

    Args:
        call_id: only this one; None: all.
    """
    rows = await transaction.calls.of_round(item.id)
    listed = item.calls or []
    if call_id is not None:
        rows = [row for row in rows if row.id == call_id]
        listed = [call for call in listed if call["id"] == call_id]
    by_id = {row.id: row for row in rows}
    approvals = await transaction.approvals.of_calls(rows)
    return [(call, by_id.get(call["id"])) for call in listed_calls(listed, rows, approvals)]


def _known(calls: Sequence[_ListedCall], events: RoundEvents) -> dict[str, _ListedCall]:
    known = {call["id"]: (call, row) for call, row in calls}
    # While the round runs its row has no calls yet, but the events have them.
    for call_id, own in events.of_calls.items():
        began = own.get(EventType.CALL_STARTED)
        if began is not None:
            known.setdefault(call_id, ({"id": call_id, **began.data}, None))
    return known


def _round(
    item: Round, calls: Sequence[_ListedCall], events: RoundEvents, *, with_values: bool
) -> models.Round:
    answered = {} if events.answered is None else events.answered.data
    known = _known(calls, events)
    return answer_of(
        models.Round,
        item,
        state=item.state.value,
        cause=turn_cause(item),
        attempts=events.attempts(item),
        prompted_at=events.prompted_at,
        # The answer of a whole turn sets both.
        prompt_kept=False,
        prompt=None,
        model_group=answered.get("group"),
        model_tries=answered.get("tries"),
        tool_calls_kept=answered.get("tool_calls_kept", True),
        tokens_estimated=bool(item.tokens_estimated),
        stop_type=None if item.stop_type is None else StopType(item.stop_type).name,
        not_resumable=item.not_resumable or None,
        calls=[_call(call, row, item, events, with_values=with_values) for call, row in known.values()],
        error=_round_error(item),
    )


def _prompt(messages: list[dict[str, Any]] | None) -> list[models.PromptMessage] | None:
    return None if messages is None else [models.PromptMessage.model_validate(item) for item in messages]


def _round_error(item: Round) -> TurnError | None:
    return None if item.error is None else TurnError(code=item.state.value, text=item.error)


def _call(
    call: Mapping[str, Any], row: Call | None, item: Round, events: RoundEvents, *, with_values: bool
) -> models.Call:
    own = events.of_calls.get(call["id"], {})
    began, ended = own.get(EventType.CALL_STARTED), own.get(EventType.CALL_ENDED)
    value = None
    if with_values and ended is not None:
        value = ended.data.get("value")
    if with_values and value is None and row is not None and row.outcome is not None:
        value = row.outcome.get("text")
    error = call.get("error") or (ended.data.get("error") if ended is not None else None)
    attempt = events.attempt_of_call.get(call["id"])
    is_over = item.finished_at is not None or (attempt is not None and attempt < item.attempt)
    return models.Call(
        id=call["id"],
        method=call["method"],
        type=SandboxMethodType(call["type"]).value,
        state=_call_state(call, row, ended, is_over=is_over),
        lane=call.get("lane"),
        worker=call.get("worker") or (ended.data.get("worker") if ended is not None else None) or None,
        requested_at=call.get("requested_at") or (began.created_at if began is not None else None),
        started_at=call.get("started_at"),
        finished_at=call.get("finished_at") or (ended.created_at if ended is not None else None),
        duration_ms=call.get("duration_ms") or (ended.data.get("duration_ms") if ended is not None else None),
        attempts=None if row is None else row.fence,
        line=None if began is None else began.data.get("line"),
        round_attempt=attempt,
        arguments=began.data.get("arguments") if with_values and began is not None else None,
        value=value,
        error=None if error is None else _call_error(error),
        follow_up=call.get("follow_up"),
        approval_id=call.get("approval_id"),
    )


def _call_state(call: Mapping[str, Any], row: Call | None, ended: ChatEvent | None, *, is_over: bool) -> str:
    if row is not None:
        return row.state.value
    if ended is not None:
        return str(ended.data["state"])
    if "duration_ms" not in call:
        # The worker of its round died before it wrote how the call ended.
        return "unknown" if is_over else "running"
    return "done" if call["error"] is None else "failed"


def _call_error(text: str) -> TurnError:
    """Split ``<type>: <message>``, as the sandboxed code saw it."""
    code, _, message = text.partition(": ")
    return TurnError(code=code, text=message or text)
