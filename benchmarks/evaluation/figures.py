"""What a task cost and how it failed, and the sums of many tasks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from statistics import median
from typing import Any

__all__ = ["Failure", "FailureKind", "Played", "Run", "Summary", "as_data", "by_cause", "ratio", "summary"]


class FailureKind(StrEnum):
    """Why a task did not pass, causes before what follows from them."""

    #: A prompt did not show what the script's next answer depends on, or there was a request too many.
    PROMPT = "prompt"
    #: A turn failed; the text has its code.
    TURN = "turn"
    #: It did not end in time.
    TIME = "time"
    #: A request to the system or to the model failed.
    ERROR = "error"
    #: The script has answers that were not asked for.
    UNUSED = "unused"
    #: What people see is not what the task wants.
    OUTCOME = "outcome"


@dataclass(frozen=True, kw_only=True)
class Failure:
    """One reason why a task did not pass."""

    kind: FailureKind
    text: str


@dataclass(frozen=True, kw_only=True)
class Run:
    """One way through a task; ``rounds`` and ``cost`` are those of all its turns.

    Tokens are those that the model's endpoint reports; ``cost`` is 0 without prices. ``new_tokens`` are the
    prompt tokens that do not repeat the beginning of the task's request before; None with a real model.
    """

    seconds: float
    rounds: int
    requests: int
    prompt_tokens: int
    completion_tokens: int
    cost: float
    new_tokens: int | None = None
    failures: tuple[Failure, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether nothing failed."""
        return not self.failures


@dataclass(frozen=True, kw_only=True)
class Played:
    """A task that was played; ``tools`` is None if tool calling was left out."""

    group: str
    task: str
    programs: Run
    tools: Run | None


@dataclass(frozen=True, kw_only=True)
class Summary:
    """The sums of some runs."""

    tasks: int
    passed: int
    rounds: int
    requests: int
    prompt_tokens: int
    completion_tokens: int
    cost: float
    new_tokens: int | None
    median_seconds: float
    max_seconds: float
    #: Tasks by the kind of their first failure.
    failures: dict[str, int]


def by_cause(failures: Iterable[Failure]) -> tuple[Failure, ...]:
    """Return failures with the causes first; a summary counts the first one."""
    return tuple(sorted(failures, key=lambda failure: list(FailureKind).index(failure.kind)))


def summary(runs: Iterable[Run]) -> Summary:
    """Return the sums of at least one run.

    Raises:
        ValueError: there is none.
    """
    known = list(runs)
    if not known:
        raise ValueError("there is no run to sum up")
    seconds = [run.seconds for run in known]
    return Summary(
        tasks=len(known),
        passed=sum(run.passed for run in known),
        rounds=sum(run.rounds for run in known),
        requests=sum(run.requests for run in known),
        prompt_tokens=sum(run.prompt_tokens for run in known),
        completion_tokens=sum(run.completion_tokens for run in known),
        cost=sum(run.cost for run in known),
        new_tokens=_sum_if_known(run.new_tokens for run in known),
        median_seconds=median(seconds),
        max_seconds=max(seconds),
        failures=dict(Counter(run.failures[0].kind.value for run in known if run.failures)),
    )


def _sum_if_known(values: Iterable[int | None]) -> int | None:
    known = list(values)
    found = [value for value in known if value is not None]
    return sum(found) if len(found) == len(known) else None


def ratio(ours: float, theirs: float) -> float | None:
    """Return the quotient; None if there is nothing to compare with."""
    return ours / theirs if theirs else None


def as_data(played: Sequence[Played]) -> list[dict[str, Any]]:
    """Return every task with its runs as JSON types."""
    return [asdict(one) for one in played]
