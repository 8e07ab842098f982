"""`nekro demo`: run a scripted tour on real services and check its results."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from broker_config.settings import Settings
from nekro.cli.command import Deps, json_flag
from nekro.cli.running import ExitCode, run_async
from nekro.cli.services.ownership import Ownership
from nekro_agent.errors import ServiceError

if TYPE_CHECKING:
    from nekro.cli.demo.points import Evidence, Point

__all__ = ["EPILOG", "Args", "run"]

EPILOG: Final = """\
examples:
  nekro demo
  nekro --data-dir /tmp/tour demo

Real processes, a real Redis, a real sandbox; only the model is a script and the model server is on loopback.
Without --data-dir the tour uses a temporary directory, which is removed when every check passes.
Exit code 0 when rows, requests, task events and files prove every point, else 1. A
point that needs packages which the sandbox lacks is left out and marked with a dash.
"""


@dataclass(frozen=True, kw_only=True)
class Args:
    """Arguments of `nekro demo`."""

    json: bool = json_flag()


def run(args: Args, deps: Deps) -> int:
    """Run the tour, check every point, print the timeline and the checks."""
    from nekro.cli.demo.stage import demo_settings

    settings = deps.load_settings()
    own_dir = deps.data_dir is None
    data_dir = Path(tempfile.mkdtemp(prefix="nekro-demo-")) if deps.data_dir is None else deps.data_dir
    settings = demo_settings(settings, data_dir.absolute())
    code: int = ExitCode.FAILED
    try:
        code = run_async(_play(settings, args, deps))
    finally:
        if own_dir and code == ExitCode.OK:
            shutil.rmtree(data_dir, ignore_errors=True)
        elif own_dir:
            deps.output.words(f"data and logs of the tour are in {data_dir}")
    return code


async def _play(settings: Settings, args: Args, deps: Deps) -> int:
    from nekro.cli.demo import points, tour
    from nekro.cli.demo.stage import open_stage

    ownership = Ownership(settings.data_dir)
    if not ownership.claim():
        raise ServiceError(f"another command uses {settings.data_dir}; choose another --data-dir")
    try:
        deps.output.words("starting Redis, two rounds workers, a methods worker and a long worker …")
        async with open_stage(settings) as stage:
            evidence = await tour.play(stage, say=deps.output.words)
    finally:
        ownership.release()
    checked = points.check(evidence)
    _print(evidence, checked, args, deps)
    return ExitCode.OK if all(point.ok or point.is_left_out for point in checked) else ExitCode.FAILED


def _print(evidence: Evidence, checked: Sequence[Point], args: Args, deps: Deps) -> None:
    from nekro.cli.demo import timeline

    entries = timeline.build(evidence)
    if args.json:
        deps.output.json(
            {"timeline": [asdict(entry) for entry in entries], "points": [asdict(point) for point in checked]}
        )
        return
    start = entries[0].at if entries else None
    rows = [
        (f"+{(entry.at - start).total_seconds():.3f}s", entry.where, entry.process or "", entry.what)
        for entry in entries
        if start is not None
    ]
    deps.output.table(("TIME", "WHERE", "PROCESS", "WHAT"), rows)
    deps.output.report("")
    for point in checked:
        mark = "✓" if point.ok else "–" if point.is_left_out else "✗"
        deps.output.report(f"{mark} {point.name}: {point.detail}")
