"""Renders an evaluation as Markdown; ``docs/evaluation.md`` has it between two marks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from benchmarks.evaluation.figures import Played, Run, Summary, ratio, summary
from benchmarks.harness.machine import Machine

__all__ = ["Taken", "as_markdown"]

_TOTAL = "**all**"


@dataclass(frozen=True, kw_only=True)
class Taken:
    """The tasks that were played, with machine, command and date."""

    played: Sequence[Played]
    machine: Machine
    command: str
    date: str
    #: Of the model; "scripted" is none.
    model: str
    methods: int
    #: Whether the model takes time for its answers; otherwise the seconds of both ways are not compared.
    has_model_time: bool


def as_markdown(taken: Taken) -> str:
    """Render the tables."""
    return "\n".join([*_origin(taken), *_table(taken, "programs"), *_tools(taken), *_failures(taken.played)])


def _origin(taken: Taken) -> Iterator[str]:
    machine = taken.machine
    busy = " Other work was running, so the seconds are upper bounds." if machine.busy else ""
    yield (
        f"Taken on {taken.date} by `{taken.command}` with the model `{taken.model}` and {taken.methods} "
        f"methods, on {machine.cores} cores ({machine.cpu}), {machine.kernel}, {machine.python}, "
        f"{machine.redis}; load {machine.load_1m:.1f} at the start.{busy}"
    )


def _table(taken: Taken, way: str) -> Iterator[str]:
    title = "Programs: the rounds of the system" if way == "programs" else "Classic tool calling"
    has_cost = any(_run(one, way).cost for one in taken.played)
    has_new = all(_run(one, way).new_tokens is not None for one in taken.played)
    head = ["group", "tasks", "passed", "rounds", "requests", "prompt tokens"]
    head += ["of these not cached"] if has_new else []
    head += ["completion tokens"]
    head += ["cost"] if has_cost else []
    head += ["seconds: median", "max", "failures"]
    if way == "tools":
        head.remove("rounds")
    yield f"\n### {title}\n"
    yield f"| {' | '.join(head)} |"
    yield f"|{'---|' * len(head)}"
    for group, runs in _by_group(taken.played, way):
        found = summary(runs)
        cells = [group, str(found.tasks), str(found.passed)]
        cells += [f"{found.rounds:,}"] if way == "programs" else []
        cells += [f"{found.requests:,}", f"{found.prompt_tokens:,}"]
        cells += [f"{found.new_tokens:,}"] if has_new else []
        cells += [f"{found.completion_tokens:,}"]
        cells += [f"{found.cost:.4f}"] if has_cost else []
        cells += [f"{found.median_seconds:.2f}", f"{found.max_seconds:.2f}", _kinds(found)]
        yield f"| {' | '.join(cells)} |"


def _tools(taken: Taken) -> Iterator[str]:
    if any(one.tools is None for one in taken.played):
        return
    yield from _table(taken, "tools")
    yield "\n### Programs divided by tool calling\n"
    yield "Below 1, programs need less.\n"
    titles = ["requests", "prompt tokens", "not cached", "completion tokens", "all tokens"]
    titles += ["seconds: median"] if taken.has_model_time else []
    yield f"| group | {' | '.join(titles)} |"
    yield f"|{'---|' * (len(titles) + 1)}"
    pairs = zip(_by_group(taken.played, "programs"), _by_group(taken.played, "tools"), strict=True)
    for (group, ours), (_, theirs) in pairs:
        quotients = _quotients(summary(ours), summary(theirs))[: len(titles)]
        shown = ("–" if value is None else f"{value:.2f}" for value in quotients)
        yield f"| {group} | {' | '.join(shown)} |"


def _quotients(one: Summary, other: Summary) -> list[float | None]:
    return [
        ratio(one.requests, other.requests),
        ratio(one.prompt_tokens, other.prompt_tokens),
        None if one.new_tokens is None else ratio(one.new_tokens, other.new_tokens or 0),
        ratio(one.completion_tokens, other.completion_tokens),
        ratio(_tokens(one), _tokens(other)),
        ratio(one.median_seconds, other.median_seconds),
    ]


def _failures(played: Sequence[Played]) -> Iterator[str]:
    failed = [
        f"- `{one.group}/{one.task}` by {name}: {failure.kind.value}: {_one_line(failure.text)}"
        for one in played
        for name, run in (("programs", one.programs), ("tool calling", one.tools))
        if run is not None
        for failure in run.failures
    ]
    if failed:
        yield "\n### What failed\n"
        yield from failed


def _by_group(played: Sequence[Played], way: str) -> list[tuple[str, list[Run]]]:
    """Return the runs of each group in order, then all of them."""
    groups: dict[str, list[Run]] = {}
    for one in played:
        groups.setdefault(one.group, []).append(_run(one, way))
    return [*groups.items(), (_TOTAL, [_run(one, way) for one in played])]


def _run(one: Played, way: str) -> Run:
    run = one.programs if way == "programs" else one.tools
    assert run is not None
    return run


def _kinds(found: Summary) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in sorted(found.failures.items()))


def _tokens(found: Summary) -> int:
    return found.prompt_tokens + found.completion_tokens


def _one_line(text: str, most: int = 300) -> str:
    line = " ".join(text.split()).replace("|", "\\|")
    return line if len(line) <= most else f"{line[:most]}…"
