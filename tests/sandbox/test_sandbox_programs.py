"""Ordinary programs run under the filter: the workloads from which its list was derived."""

from __future__ import annotations

import runpy
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from sandbox_lab import REPOSITORY, lab

from broker_config.settings import SandboxSettings
from nekro.sandbox.drivers.bwrap import BwrapDriver
from nekro.sandbox.filter.seccomp import build_filter
from nekro.sandbox.models import StopType

WORKLOADS: dict[str, str] = runpy.run_path(str(REPOSITORY / "scripts" / "seen-syscalls"))["WORKLOADS"]
PACKAGES = {"numpy", "pandas", "matplotlib", "PIL"}


@pytest.mark.parametrize("strict", [False, True], ids=["cgroup_filter", "strict_filter"])
@pytest.mark.parametrize("name", sorted(WORKLOADS))
async def test_workload_runs_under_the_filter(
    name: str, strict: bool, bwrap_driver: BwrapDriver, tmp_path: Path
) -> None:
    settings = SandboxSettings(memory_bytes=1 << 30)
    if name in PACKAGES:
        if find_spec(name) is None:
            pytest.skip(f"{name} is not installed beside these tests")
        settings = SandboxSettings(memory_bytes=1 << 30, python=Path(sys.executable))
    driver = BwrapDriver(settings)
    # The filter of the other mode is tried as well.
    driver.__dict__["_filter"] = build_filter(strict_memory=strict)
    async with lab(tmp_path, use=driver) as box:
        result = await box.run(WORKLOADS[name])
    assert result.stop_type is StopType.NORMAL, result.output or result.error
