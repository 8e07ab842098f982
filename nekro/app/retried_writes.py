"""Transactions that are repeated until it is certain whether they were committed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, TypeVar

from nekro_agent.durations import PUBLISH_SECONDS, RETRY_SECONDS
from nekro_agent.errors import OutcomeUnknownError, StorageUnavailableError
from storage.driver.errors import is_refusal

if TYPE_CHECKING:
    # With SQLAlchemy, which a command that calls a TOOL method need not import.
    from storage.transaction import Transaction

__all__ = ["write_with_retries"]

_Value = TypeVar("_Value")


async def write_with_retries(
    begin: Callable[[], AbstractAsyncContextManager[Transaction]],
    write: Callable[[Transaction], Awaitable[_Value]],
    *,
    unknown: str | None,
    is_in_doubt: bool = False,
    seconds: float | None = None,
    on_failure: Callable[[StorageUnavailableError], None] | None = None,
) -> _Value:
    """Run a transaction, and repeat it during a short outage of the database.

    Args:
        begin: ``Database.begin``, or ``Database.autocommit`` for a single statement, which is faster.
        write: must have no second effect after it was committed.
        unknown: what the caller does not know if the commit's confirmation was lost, for the error; None if
            that makes no difference.
        is_in_doubt: whether the same may have been committed before, for example by another process.
        seconds: after this time no attempt is begun; None: ``PUBLISH_SECONDS``.
        on_failure: called after each attempt that failed.

    Raises:
        StorageUnavailableError: the database does not answer; nothing was written, if ``unknown`` is given.
        OutcomeUnknownError: the database does not answer, and the transaction may have been committed.
    """
    give_up_at = time.monotonic() + (PUBLISH_SECONDS if seconds is None else seconds)
    while True:
        is_open = False
        try:
            async with begin() as transaction:
                is_open = True
                return await write(transaction)
        except StorageUnavailableError as exc:
            is_in_doubt |= is_open and not is_refusal(exc)
            if on_failure is not None:
                on_failure(exc)
            if time.monotonic() > give_up_at:
                if is_in_doubt and unknown is not None:
                    raise OutcomeUnknownError(f"the database failed, so {unknown}") from exc
                raise
        await asyncio.sleep(RETRY_SECONDS)
