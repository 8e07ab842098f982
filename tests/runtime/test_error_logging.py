"""Loops that continue after an error, and steps that are repeated while there is work for them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from loguru import logger
from waiting import eventually

from nekro.app.background import BackgroundLoop, Poll
from nekro.base.tasks import log_errors
from nekro_agent.errors import StorageUnavailableError


@pytest.fixture
def logged() -> Iterator[list[tuple[str, str, dict[str, object], bool]]]:
    """Event, level, fields and whether there is a traceback, of each log record."""
    found: list[tuple[str, str, dict[str, object], bool]] = []

    def note(line: object) -> None:
        record = line.record  # type: ignore[attr-defined]
        found.append(
            (record["message"], record["level"].name, record["extra"], record["exception"] is not None)
        )

    sink = logger.add(note)
    yield found
    logger.remove(sink)


def test_an_error_is_logged_with_a_traceback_only_if_it_is_unexpected(
    logged: list[tuple[str, str, dict[str, object], bool]],
) -> None:
    with log_errors("not_read", key="k"):
        raise StorageUnavailableError("away")
    with log_errors("not_read", key="k"):
        raise ValueError("unexpected")
    # Other fields are those that earlier tests gave all records of the process.
    assert [
        (event, level, fields["key"], fields.get("error"), has_traceback)
        for event, level, fields, has_traceback in logged
    ] == [
        ("not_read", "WARNING", "k", "away", False),
        ("not_read", "ERROR", "k", None, True),
    ]


@pytest.mark.parametrize("error", [asyncio.CancelledError, KeyboardInterrupt])
def test_cancellations_and_interrupts_are_raised(error: type[BaseException]) -> None:
    with pytest.raises(error), log_errors("not_read"):
        raise error


async def test_a_poll_continues_after_an_error_and_runs_only_while_it_is_needed(
    background: BackgroundLoop, logged: list[tuple[str, str, dict[str, object], bool]]
) -> None:
    work, steps = ["a", "b"], list[str]()

    async def step() -> None:
        steps.append(work.pop(0))
        if steps == ["a"]:
            raise ValueError("unexpected")

    poll = Poll(background, step, seconds=0, is_needed=lambda: bool(work), on_error="step_failed")
    poll.start()
    poll.start()  # runs already
    await eventually(lambda: steps == ["a", "b"] and not poll._is_running, what="two steps")
    assert [event for event, *_ in logged if event == "step_failed"] == ["step_failed"]
    work.append("c")
    poll.start()
    await eventually(lambda: steps == ["a", "b", "c"], what="a step of new work")
