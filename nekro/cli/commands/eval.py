"""`nekro eval`: run saved cases, and compare what their programs do with what they must do."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from nekro.cli.command import Deps, arg, json_flag
from nekro.cli.running import run_async

__all__ = ["EPILOG", "Args", "run"]

EPILOG: Final = """\
examples:
  nekro eval cases
  nekro eval cases/rain.yaml cases/train.yaml --json

Runs the programs of each case in a sandbox of this command with the answers in its file, and prints where a
call, an end or an output differs from it: without a worker, a database, a request to a model, and without an
effect. `nekro replay 4f1c2a --save cases/rain.yaml` writes a case. Of a directory
all files run that end in .yaml or .yml. Exit code: 0 nothing differs, 1 something does, 2 a file is no case;
then none runs.
"""


@dataclass(frozen=True, kw_only=True)
class Args:
    """Arguments of `nekro eval`."""

    cases: list[Path] = arg(
        nargs="+", metavar="CASES", type=Path, help="files of cases, and directories of them"
    )
    json: bool = json_flag()


def run(args: Args, deps: Deps) -> int:
    """Run the cases; returns whether one differs."""
    from nekro.app.rounds.cases import find_cases, run_cases
    from nekro.cli.views.replays import program_json, show_program

    results = run_async(run_cases(deps.load_settings(), find_cases(args.cases)))
    is_same = all(result.is_same for result in results)
    if args.json:
        cases = [
            {
                "case": str(result.path),
                "is_same": result.is_same,
                "programs": [program_json(program) for program in result.programs],
            }
            for result in results
        ]
        deps.output.json({"is_same": is_same, "cases": cases})
        return 0 if is_same else 1
    for result in results:
        deps.output.report(f"{result.path}: {'the same' if result.is_same else 'differs'}")
        for program in result.programs:
            if program.differences:
                show_program(program, deps.output, indent="  ")
    failed = sum(not result.is_same for result in results)
    deps.output.report(f"{len(results) - failed} of {len(results)} cases are the same")
    return 0 if is_same else 1
