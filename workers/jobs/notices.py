"""Notifies a chat of a failed job: a system message, and a round for an agent that may wait for it."""

from __future__ import annotations

from nekro.app.chats.publisher import EventPublisher
from nekro.app.chats.writer import append_message, request_round
from nekro_agent.ports import MessageKind
from storage.repositories.jobs import Job
from storage.repositories.messages import NewMessage
from storage.repositories.rounds import RoundRequest
from storage.states import TriggerKind
from storage.transaction import Transaction

__all__ = ["notify_chat_of_failure"]


async def notify_chat_of_failure(transaction: Transaction, publisher: EventPublisher, job: Job) -> None:
    """Record both once per job, in the transaction that ends the job; nothing for a job without a chat."""
    if not job.chat_key:
        return
    message = NewMessage(
        chat_key=job.chat_key,
        kind=MessageKind.SYSTEM,
        text=f"Background task {job.type} {job.task_id!r} failed: {job.message}",
        plugin_key=job.plugin_key,
        once_key=f"job:{job.id}",
    )
    row = await append_message(transaction, publisher, message)
    request = RoundRequest(
        chat_key=job.chat_key, trigger_kind=TriggerKind.JOB, trigger_id=job.id, cause_turn_id=job.turn_id
    )
    await request_round(transaction, publisher, request, account_id=job.id, message=row)
