"""Stop types and explanations for every way in which a run ends."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from nekro.agent import verdict
from nekro.sandbox.models import Limit, RunResult, StopType


def result(stop: StopType, **fields: Any) -> RunResult:
    values: dict[str, Any] = {
        "run_id": "r", "exit_code": 1, "output": "", "truncated": False, "limit": None, "calls": 0,
        "error": None, "started_at": datetime(2026, 1, 1, tzinfo=UTC), "duration_seconds": 1.0,
        "driver": "bwrap",
    }  # fmt: skip
    return RunResult(stop_type=stop, **(values | fields))


@pytest.mark.parametrize("stop", list(StopType))
def test_only_a_normal_end_and_a_call_that_waits_need_no_further_round(stop: StopType) -> None:
    judged = verdict.judge(result(stop, exit_code=9), wall_seconds=60, max_calls=200)
    assert judged.stop_type is stop
    assert judged.wants_more is (stop not in (StopType.NORMAL, StopType.APPROVAL, StopType.WAITING))
    ended_as_meant = stop not in (StopType.ERROR, StopType.TIMEOUT, StopType.SECURITY)
    assert bool(judged.reason) is not ended_as_meant


@pytest.mark.parametrize("limit", list(Limit))
def test_every_limit_has_an_explanation(limit: Limit) -> None:
    judged = verdict.judge(result(StopType.ERROR, limit=limit, exit_code=137), wall_seconds=60, max_calls=200)
    assert judged.reason.startswith("The program was stopped at a limit of its sandbox: it ")


def test_an_error_is_named_unless_the_output_shows_it() -> None:
    died = result(StopType.ERROR, exit_code=139, error="the process was killed by signal 11")
    assert verdict.judge(died, wall_seconds=60, max_calls=200).reason == (
        "The program ended with an error (exit code 139): the process was killed by signal 11"
    )
    raised = result(StopType.ERROR, error="KeyError: 1", output="Traceback …\nKeyError: 1\n")
    assert (
        verdict.judge(raised, wall_seconds=60, max_calls=200).reason
        == "The program ended with an error (exit code 1)."
    )


def test_an_operators_stop_is_not_followed_by_a_new_round() -> None:
    judged = verdict.judge(result(StopType.MANUAL, exit_code=137), wall_seconds=60, max_calls=200)
    assert (judged.stop_type, judged.wants_more) == (StopType.MANUAL, False)


@pytest.mark.parametrize("stop", [StopType.NORMAL, StopType.ERROR, StopType.TIMEOUT])
def test_exceeding_the_calls_of_a_round_ends_the_turn_with_an_explanation(stop: StopType) -> None:
    judged = verdict.judge(result(stop, calls=201), wall_seconds=60, max_calls=200)
    assert (judged.stop_type, judged.wants_more) == (stop, False)
    assert judged.notice is not None and "200 method calls" in judged.notice
    enough = verdict.judge(result(stop, calls=200), wall_seconds=60, max_calls=200)
    assert enough.notice is None


def test_an_agent_result_does_not_stop_the_turn() -> None:
    judged = verdict.judge(result(StopType.AGENT, calls=201), wall_seconds=60, max_calls=200)
    assert (judged.wants_more, judged.notice) == (True, None)


def test_answers_that_are_cut_three_times_are_no_error_of_a_program() -> None:
    cut = verdict.words_cut("A long story", "length", is_last=False)
    assert cut.words is None and cut.wants_more
    ended = verdict.error_repeated(cut, cut.reason)
    assert ended.notice.startswith(
        "I stopped here after 3 attempts with the same result: my answer was cut off at the limit of its "
        "length. Send another message"
    )
