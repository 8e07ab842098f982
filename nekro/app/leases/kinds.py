"""The kinds of leases on rows that processes hold, and what ends each of them.

The stream of a client of the SSE adapter is none of them: its newest connection has it, whatever the one
before does, and the row says when the client was seen (``AdapterRepository.connect``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

from storage.access.requests import REQUEST_CLAIMS
from storage.outbound.downloads import DOWNLOAD_CLAIMS
from storage.publications import WORKER_LEASES
from storage.repositories.calls import CALL_CLAIMS
from storage.repositories.chats import CHAT_LEASES, ChatRepository
from storage.repositories.jobs import JOB_CLAIMS
from storage.repositories.leases import NAMED_LEASES, LeaseRepository, LeaseTable
from storage.transaction import Transaction

__all__ = [
    "CALL",
    "CHAT",
    "DOWNLOAD",
    "INIT",
    "JOB",
    "PINNED",
    "REQUEST",
    "SUMMARY",
    "SWEEP",
    "WORKER",
    "LeaseKind",
]


@dataclass(frozen=True, kw_only=True, eq=False)
class LeaseKind:
    """A kind of leases."""

    #: As in the metric ``nekro_leases_lost_total``.
    name: str
    table: LeaseTable
    #: Whether a lease that was not renewed in time is lost, even if no other holder has acquired it: its
    #: work has effects that neither a fencing token nor ``HeldLease.ensure`` prevents. Otherwise it is
    #: renewed when the database answers again, so that an outage does not end the work.
    is_lost_with_time: bool
    #: The repository that acquires and releases the lease; None if the statements that start and finish the
    #: work do so.
    rows: Callable[[Transaction], ChatRepository | LeaseRepository] | None = None


_named_kind: Final = partial(LeaseKind, table=NAMED_LEASES, rows=lambda transaction: transaction.leases)

#: A running call. Its outcome is refused if the claim passed on; the method itself is not stopped.
CALL: Final = LeaseKind(name="call", table=CALL_CLAIMS, is_lost_with_time=False)
#: The rounds of a chat. Each call of a round is preceded by ``ensure``.
CHAT: Final = LeaseKind(
    name="chat", table=CHAT_LEASES, is_lost_with_time=False, rows=lambda transaction: transaction.chats
)
#: A background job, which may run for hours and survives outages of the database.
JOB: Final = LeaseKind(name="job", table=JOB_CLAIMS, is_lost_with_time=False)
#: A download: two writers would corrupt its file, and the next holder resumes it.
DOWNLOAD: Final = LeaseKind(name="download", table=DOWNLOAD_CLAIMS, is_lost_with_time=True)
#: The init hooks of the plugins: one process at a time.
INIT: Final = _named_kind(name="init", is_lost_with_time=True)
#: A plugin whose state is in one process.
PINNED: Final = _named_kind(name="pinned", is_lost_with_time=True)
#: A request with an idempotency key. After a loss another execution answers, and this answer is not stored.
REQUEST: Final = LeaseKind(name="request", table=REQUEST_CLAIMS, is_lost_with_time=False)
#: The summaries of a chat. A second writer costs a request; the row of a version is written once.
SUMMARY: Final = _named_kind(name="summary", is_lost_with_time=False)
#: The sweep; overlapping sweeps are harmless, because each takes rows exclusively.
SWEEP: Final = _named_kind(name="sweep", is_lost_with_time=False)
#: A worker in the catalogue. One that was suspended or cut off renews it afterwards, or enters again.
WORKER: Final = LeaseKind(name="worker", table=WORKER_LEASES, is_lost_with_time=False)
