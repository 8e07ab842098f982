"""Types of the events of chats: workers store them, and the client reads them.

Importing this module loads nothing else, so that a worker need not load what the client needs.
"""

from enum import StrEnum
from typing import Final

__all__ = ["STARTS_OF_ATTEMPTS", "EventType"]


class EventType(StrEnum):
    """Types of events; those marked live are not kept and have no number."""

    #: A person wrote.
    MESSAGE_RECEIVED = "message.received"
    #: The agent wrote.
    MESSAGE_SENT = "message.sent"
    #: Live: a piece of words that the model writes and that will be a message.
    MESSAGE_DELTA = "message.delta"
    #: Words that were shown while they were written became no message, or another one.
    MESSAGE_WITHDRAWN = "message.withdrawn"
    #: The agent sent a file or picture.
    FILE_SENT = "file.sent"
    #: A system message was added, which the agent sees and people do not.
    MESSAGE_NOTED = "message.noted"
    #: The first round of a turn was requested.
    TURN_STARTED = "turn.started"
    #: No round of the turn will run any more; once per turn.
    TURN_ENDED = "turn.ended"
    #: Once per attempt at a round, but for those of ``PROGRAM_RESUMED``.
    ROUND_STARTED = "round.started"
    ROUND_ENDED = "round.ended"
    MODEL_REQUESTED = "model.requested"
    #: Live: a piece of the model's answer.
    MODEL_DELTA = "model.delta"
    CODE_READY = "code.ready"
    #: The round's program runs again, from its first line, because its worker went down; calls that it made
    #: are not made again.
    PROGRAM_RESUMED = "program.resumed"
    #: Live: a piece of the code's output.
    OUTPUT_CHUNK = "output.chunk"
    CALL_STARTED = "call.started"
    #: Live: what a running call reported.
    CALL_PROGRESS = "call.progress"
    CALL_ENDED = "call.ended"
    #: A call waits until a person approves it.
    APPROVAL_REQUESTED = "approval.requested"
    #: A person decided on a call, its request expired, or it was cancelled.
    APPROVAL_DECIDED = "approval.decided"
    #: A program waits, without a process, for the end of a job, a time, or the answer of a person.
    WAIT_STARTED = "wait.started"
    #: What a program waited for has come, too late, or its wait was cancelled.
    WAIT_ENDED = "wait.ended"
    JOB_STARTED = "job.started"
    JOB_PROGRESS = "job.progress"
    JOB_ENDED = "job.ended"
    #: Live, the last one of a stream: the database has lost the events after ``data.after``.
    EVENTS_LOST = "events.lost"


#: One of them begins each attempt at a round.
STARTS_OF_ATTEMPTS: Final = frozenset({EventType.ROUND_STARTED, EventType.PROGRAM_RESUMED})
