"""A system with the packages of the base install alone: none of an extra, and none of these tests."""

from __future__ import annotations

import json
import os
import subprocess
import venv
from importlib.metadata import Distribution, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from waiting import WAIT_SECONDS

pytestmark = pytest.mark.extended

ROOT = Path(__file__).parents[2]
#: Prints those of its arguments that are modules.
ASK = """
import importlib.util, json, sys
print(json.dumps([name for name in sys.argv[1:] if importlib.util.find_spec(name)]))
"""
PLUGIN = """
from nekro_agent.api.plugin import NekroPlugin, SandboxMethodType

plugin = NekroPlugin(name="K", module_name="k", description="d", version="1", author="Ada", url="")


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, name="Add", description="Add.")
async def add(_ctx, one: int, two: int) -> int:
    return one + two
"""


def needed(name: str, extras: frozenset[str] = frozenset()) -> dict[str, Distribution]:
    """Return what a distribution needs, itself included, by name."""
    found: dict[str, Distribution] = {}
    seen: set[tuple[str, frozenset[str]]] = set()
    waiting = [(name, extras)]
    while waiting:
        name, extras = one = waiting.pop()
        if one in seen:
            continue
        seen.add(one)
        found[canonicalize_name(name)] = dist = distribution(name)
        for line in dist.requires or ():
            need = Requirement(line)
            if need.marker is None or any(need.marker.evaluate({"extra": extra}) for extra in ("", *extras)):
                waiting.append((need.name, frozenset(need.extras)))
    return found


@pytest.fixture
def base_python(tmp_path: Path) -> Path:
    """An interpreter whose packages are those that the project's base install brings."""
    venv.create(tmp_path / "base", with_pip=False)
    (packages,) = (tmp_path / "base" / "lib").glob("python*/site-packages")
    ours = needed("nekro-workers")
    del ours["nekro-workers"]
    for dist in ours.values():
        for file in dist.files or ():
            if ".." not in file.parts:
                target = packages / file
                target.parent.mkdir(parents=True, exist_ok=True)
                target.symlink_to(Path(str(file.locate())))
    (packages / "ours.pth").write_text(f"{ROOT}\n")
    return tmp_path / "base" / "bin" / "python"


def test_code_calls_methods_without_the_packages_of_any_extra(base_python: Path, tmp_path: Path) -> None:
    (tmp_path / "plugins").mkdir()
    (tmp_path / "plugins" / "k.py").write_text(PLUGIN)
    (tmp_path / "code.py").write_text("print('the sum is', add(40, 2))")
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("NEKRO_")},
        "NEKRO_PLUGINS__DIRS": str(tmp_path / "plugins"),
    }

    def run(*command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [base_python, *command], cwd=tmp_path, env=environment, capture_output=True, text=True,
            timeout=WAIT_SECONDS,
        )  # fmt: skip

    absent = ("flower", "mcp", "mcp_types", "opentelemetry.sdk", "pytest", "qdrant_client")
    found = run("-c", ASK, "redis", *absent)
    assert json.loads(found.stdout) == ["redis"], found.stderr
    done = run("-P", "-m", "nekro.cli.main", "exec", "code.py")
    assert done.returncode == 0, done.stderr
    assert "the sum is 42" in done.stdout
