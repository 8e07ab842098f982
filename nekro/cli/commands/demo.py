"""`nekro demo`: run a scripted tour on real services and check its results."""

from __future__ import annotations

import shutil
import sys
import tempfile
from dataclasses import dataclass
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Final

from broker_config.settings import Settings
from nekro.cli.command import Deps, json_flag
from nekro.cli.running import ExitCode, run_async
from nekro.cli.services.ownership import Ownership
from nekro_agent.errors import ServiceError

__all__ = ["EPILOG", "Args", "load_demo", "run"]

EPILOG: Final = """\
examples:
  nekro demo
  nekro --data-dir /tmp/tour demo

Real processes, a real Redis, a real sandbox; only the model is a script and the model server is on loopback.
Without --data-dir the tour uses a temporary directory, which is removed when every check passes.
Exit code 0 when rows, requests, task events and files prove every point, else 1. A
point that needs packages which the sandbox lacks is left out and marked with a dash.
"""

#: Name of the package of the tour, wherever its folder is.
_PACKAGE: Final = "nekro_demo"


@dataclass(frozen=True, kw_only=True)
class Args:
    """Arguments of `nekro demo`."""

    json: bool = json_flag()


def run(args: Args, deps: Deps) -> int:
    """Run the tour, check every point, print the timeline and the checks."""
    settings = deps.load_settings()
    own_dir = deps.data_dir is None
    data_dir = Path(tempfile.mkdtemp(prefix="nekro-demo-")) if deps.data_dir is None else deps.data_dir
    settings = load_demo("stage").demo_settings(settings, data_dir.absolute())
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
    points, stages, timeline, tour = (load_demo(name) for name in ("points", "stage", "timeline", "tour"))
    ownership = Ownership(settings.data_dir)
    if not ownership.claim():
        raise ServiceError(f"another command uses {settings.data_dir}; choose another --data-dir")
    try:
        deps.output.words("starting Redis, two rounds workers, a methods worker and a long worker …")
        async with stages.open_stage(settings) as stage:
            evidence = await tour.play(stage, say=deps.output.words)
    finally:
        ownership.release()
    checked = points.check(evidence)
    timeline.show(evidence, checked, deps.output, as_json=args.json)
    return ExitCode.OK if all(point.ok or point.is_left_out for point in checked) else ExitCode.FAILED


def load_demo(name: str) -> ModuleType:
    """Import a module of the tour: an example in the source tree, which the wheel has too."""
    if _PACKAGE not in sys.modules:
        nekro = Path(__file__).resolve().parents[2]
        installed = nekro / "_demo"
        folder = installed if installed.is_dir() else nekro.parent / "examples" / "demo"
        spec = spec_from_file_location(
            _PACKAGE, folder / "__init__.py", submodule_search_locations=[str(folder)]
        )
        if spec is None or spec.loader is None:
            raise ServiceError(f"the tour is not installed in {folder}")
        package = module_from_spec(spec)
        spec.loader.exec_module(package)
        sys.modules[_PACKAGE] = package
    return import_module(f"{_PACKAGE}.{name}")
