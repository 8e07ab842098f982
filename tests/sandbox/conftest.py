"""Real sandboxes for the tests; skipped, with the reason, where the machine has none."""

from __future__ import annotations

import os
import platform
import shutil
import sys
import sysconfig
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from sandbox_lab import SYSTEM_PYTHON, Lab, lab

from broker_config.settings import SandboxSettings
from nekro.sandbox.drivers.bwrap import BwrapDriver
from nekro_agent.errors import SandboxUnavailableError


@pytest.fixture(scope="session")
def found_by_driver() -> dict[str, object]:
    """What the default driver finds on this host."""
    driver = BwrapDriver(SandboxSettings())
    try:
        return {"tools": driver.tools, "interpreter": driver.interpreter}
    except SandboxUnavailableError as exc:
        pytest.skip(str(exc))


@pytest.fixture
async def bwrap_driver(found_by_driver: dict[str, object]) -> AsyncIterator[BwrapDriver]:
    """The default driver with default settings; its fork server ends with the test."""
    driver = BwrapDriver(SandboxSettings())
    driver.__dict__.update(found_by_driver)
    yield driver
    await driver.close()


@pytest.fixture
async def box(bwrap_driver: BwrapDriver, tmp_path: Path) -> AsyncIterator[Lab]:
    """A lab with default settings."""
    async with lab(tmp_path, use=bwrap_driver) as made:
        yield made


@pytest.fixture(scope="session")
def other_user(found_by_driver: dict[str, object]) -> None:
    """Needs root, to change the user, and a system Python that contains our packages."""
    if os.geteuid() != 0 or shutil.which("setpriv") is None:
        pytest.skip("needs root and setpriv to run as another user")
    expected = f"python{sys.version_info.major}.{sys.version_info.minor}"
    if not SYSTEM_PYTHON.exists() or SYSTEM_PYTHON.resolve().name != expected:
        pytest.skip(f"needs a system Python {expected}, to which this environment's packages fit")


@pytest.fixture
def own_packages() -> None:
    """Needs packages that belong to the interpreter and are mounted with it."""
    if not Path(sysconfig.get_paths()["purelib"], "pydantic").is_dir():
        pytest.skip("this interpreter's packages come by PYTHONPATH, not by an installation")


@pytest.fixture
def x86_64() -> None:
    """Needs the system call numbers of x86_64."""
    if platform.machine() != "x86_64":
        pytest.skip("the attempt names system calls by their numbers on x86_64")
