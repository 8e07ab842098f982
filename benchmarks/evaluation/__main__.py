"""Play the tasks and print what they cost: ``python -m benchmarks.evaluation --help``."""

from __future__ import annotations

import argparse
import asyncio
import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.evaluation.figures import Played, Run, as_data
from benchmarks.evaluation.page import Taken, as_markdown
from benchmarks.evaluation.run import opened, play_all
from benchmarks.evaluation.script import MODEL
from benchmarks.evaluation.system import is_real_model
from benchmarks.evaluation.task import Task
from benchmarks.evaluation.tasks import GROUPS
from benchmarks.harness.machine import describe_machine
from benchmarks.harness.processes import interrupted_by_sigterm
from benchmarks.harness.redis_server import redis_version
from benchmarks.scaling.page import write_between_marks

if TYPE_CHECKING:
    from broker_config.settings import Settings

__all__ = ["evaluate", "main", "parse"]

_EPILOG = """\
examples:
  make eval                                            play all tasks with the scripted model
  make eval EVAL_ARGS='--write docs/evaluation.md'     and write the tables into the page
  make eval EVAL_ARGS='--only errors --only jobs/report --json eval.json'
  NEKRO_LLM__BASE_URL=http://127.0.0.1:8000/v1 NEKRO_LLM__MODEL=m make eval    with a real model

Redis, database, workers and gateway are of the evaluation's own. exit codes: 0 every task passed by programs
(and, with the scripted model, by tool calling); 1 one failed; 2 usage; 130 interrupted
"""
_INTERRUPTED = 130
_SCRIPTED_SECONDS = 60.0
_REAL_SECONDS = 300.0


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Read the command line; ends the process with code 2 when it is wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.evaluation",
        description="Play tasks through the system and by classic tool calling, and print their costs.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--only",
        action="append",
        metavar="GROUP[/TASK]",
        help="play only this group or task; may be repeated",
    )
    parser.add_argument("--list", action="store_true", help="list the tasks and play none")
    parser.add_argument("--no-tools", action="store_true", help="leave tool calling out")
    parser.add_argument(
        "--scripted", action="store_true", help="use the scripted model although the settings name a real one"
    )
    parser.add_argument(
        "--model-seconds",
        type=float,
        default=0.0,
        metavar="S",
        help="what the scripted model takes for each answer (default: 0)",
    )
    parser.add_argument(
        "--seconds",
        type=float,
        metavar="S",
        help=f"longest time of a task (default: {_SCRIPTED_SECONDS:g}; with a real model {_REAL_SECONDS:g})",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every task's figures to FILE")
    parser.add_argument(
        "--write", type=Path, metavar="PAGE", help="write the tables between the marks of PAGE"
    )
    options = parser.parse_args(argv)
    try:
        options.groups = chosen(options.only)
    except ValueError as exc:
        parser.error(str(exc))
    return options


def chosen(names: Sequence[str] | None) -> dict[str, list[Task]]:
    """Return the tasks that are named, as ``group`` or ``group/task``; all without names.

    Raises:
        ValueError: there is no such group or task.
    """
    known = {f"{group}/{task.name}" for group, tasks in GROUPS.items() for task in tasks}
    for name in names or ():
        if name not in GROUPS and name not in known:
            raise ValueError(f"there is no group or task {name!r}; --list lists them")
    found = {
        group: [task for task in tasks if not names or group in names or f"{group}/{task.name}" in names]
        for group, tasks in GROUPS.items()
    }
    return {group: tasks for group, tasks in found.items() if tasks}


async def evaluate(options: argparse.Namespace, settings: Settings, command: str) -> Taken:
    """Play the chosen tasks; progress goes to stderr."""
    scripted = options.scripted or not is_real_model(settings)
    limit = options.seconds or (_SCRIPTED_SECONDS if scripted else _REAL_SECONDS)
    machine = describe_machine(redis_version())  # before the tasks load it
    async with opened(
        settings, scripted=scripted, limit_seconds=limit, model_seconds=options.model_seconds
    ) as bench:
        played = await play_all(bench, options.groups, with_tools=not options.no_tools, said=_say)
    return Taken(
        played=played,
        machine=machine,
        command=command,
        date=datetime.now(UTC).date().isoformat(),
        model=MODEL if scripted else settings.llm.model,
        methods=bench.methods,
        has_model_time=not scripted or options.model_seconds > 0,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run from the command line; the tables go to stdout."""
    given = list(sys.argv[1:] if argv is None else argv)
    options = parse(given)
    if options.list:
        print("\n".join(f"{group}/{task.name}" for group, tasks in options.groups.items() for task in tasks))
        return 0
    interrupted_by_sigterm()
    from broker_config.settings import Settings

    try:
        taken = asyncio.run(evaluate(options, Settings.load(), _command(given)))
    except KeyboardInterrupt:
        print("interrupted; all started processes have been stopped", file=sys.stderr)
        return _INTERRUPTED
    if options.json is not None:
        options.json.write_text(json.dumps(_data(taken), indent=2) + "\n", "utf-8")
    text = as_markdown(taken)
    print(text)
    if options.write is not None:
        write_between_marks(options.write, text)
    return 0 if all(_counts(one, taken.model == MODEL) for one in taken.played) else 1


def _counts(one: Played, is_scripted: bool) -> bool:
    """Whether a task passed; a real model's failures with tools are only reported."""
    return one.programs.passed and (not is_scripted or one.tools is None or one.tools.passed)


def _command(given: Sequence[str]) -> str:
    return f"make eval EVAL_ARGS={shlex.quote(shlex.join(given))}" if given else "make eval"


def _data(taken: Taken) -> Mapping[str, object]:
    return {
        "model": taken.model,
        "methods": taken.methods,
        "date": taken.date,
        "command": taken.command,
        "machine": {**asdict(taken.machine), "busy": taken.machine.busy},
        "tasks": as_data(taken.played),
    }


def _say(one: Played) -> None:
    ways = [_way("programs", one.programs)]
    if one.tools is not None:
        ways.append(_way("tools", one.tools))
    print(f"{one.group}/{one.task}: {'; '.join(ways)}", file=sys.stderr, flush=True)
    for run in filter(None, (one.programs, one.tools)):
        for failure in run.failures:
            print(f"    {failure.kind.value}: {failure.text}", file=sys.stderr, flush=True)


def _way(name: str, run: Run) -> str:
    state = "passed" if run.passed else "FAILED"
    tokens = run.prompt_tokens + run.completion_tokens
    return f"{name} {state}, {run.requests} requests, {tokens:,} tokens, {run.seconds:.2f} s"


if __name__ == "__main__":
    sys.exit(main())
