"""Select the driver that the settings name, and check it by running a sandbox, not by installed versions."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import secrets
import time
from pathlib import Path
from typing import Final

from broker_config.settings import SandboxSettings
from nekro.sandbox.driver import Capability, IsolationCheck, Sandbox, SandboxDriver, SandboxSpec
from nekro.sandbox.drivers.bwrap import BwrapDriver
from nekro.sandbox.drivers.container import ContainerDriver
from nekro.sandbox.drivers.fork_server import ForkServer
from nekro.sandbox.drivers.supervised import LandlockDriver, UnsafeDriver
from nekro.sandbox.leftovers import make_home, remove_home
from nekro.sandbox.limits.enforcement import other_limits
from nekro.sandbox.limits.processes import hold_of_all
from nekro.sandbox.models import RunRequest, StopType, StubCall, StubResult
from nekro.sandbox.run import SandboxRun
from nekro.sandbox.users import UserHold, hold_user, prepare_directories
from nekro_agent.durations import PROGRAM_SECONDS
from nekro_agent.errors import SandboxError, SandboxUnavailableError

__all__ = [
    "build_driver",
    "check_fork_server",
    "choose_driver",
    "describe",
    "probe",
]

_PROBE_KEY = "probe"
_COLD: Final = "each run is started by bubblewrap, which costs about 25 ms of a processor more"


async def probe(driver: SandboxDriver, settings: SandboxSettings) -> Capability:
    """Check the driver's requirements, then run code that must print a random word and write a file."""
    checks = await driver.examine()
    capability = Capability(driver=driver.name, checks=checks)
    if not capability.ok:
        return capability
    return Capability(driver=driver.name, checks=(*checks, await _run_once(driver, settings)))


async def check_fork_server(driver: SandboxDriver, settings: SandboxSettings) -> IsolationCheck | None:
    """Start the driver's fork server and run code in a fork; None where there is no fork server."""
    if not isinstance(driver, BwrapDriver) or driver.forks is None:
        return None
    loaded, _ = driver.forks
    try:
        run = await _run_once(driver, settings, forks=loaded)
    finally:
        await driver.close()
    return dataclasses.replace(run, name="fork server", needed=False, fix="" if run.ok else _COLD)


async def _run_once(
    driver: SandboxDriver, settings: SandboxSettings, *, forks: ForkServer | None = None
) -> IsolationCheck:
    """Run code in a sandbox; in one of the fork server if it is given."""
    word = secrets.token_hex(8)
    try:
        user = hold_user(_PROBE_KEY, settings=settings)
    except SandboxError as exc:
        return IsolationCheck(name="sandbox run", ok=False, detail=str(exc))
    with user, contextlib.ExitStack() as clean_up:
        base = make_home()
        clean_up.callback(remove_home, base)
        spec = dataclasses.replace(_spec(base, settings, user), may_fork=forks is not None)
        if forks is not None and not await forks.ready(forks.kind_of(spec)):
            return IsolationCheck(name="fork server", ok=False, detail=forks.reason)
        request = RunRequest(
            run_id=_PROBE_KEY,
            chat_key=_PROBE_KEY,
            container_key=_PROBE_KEY,
            code=f"print({word!r})\nopen('shared/{word}', 'w').close()",
            methods=(),
            dispatch=_no_methods,
            wall_seconds=PROGRAM_SECONDS,
        )
        try:
            begin = time.perf_counter()
            sandbox = await driver.start(spec)
            started_seconds = time.perf_counter() - begin
            if forks is not None and not sandbox.is_forked:
                await sandbox.close()
                return IsolationCheck(name="fork server", ok=False, detail="it did not fork a run")
            if (blind := await asyncio.to_thread(_guards_are_blind, sandbox, settings)) is not None:
                await sandbox.close()
                return blind
            run = SandboxRun(sandbox, request, settings=settings, driver=driver.name)
            result = await run.execute(methods={}, dispatch=_no_methods)
        except SandboxError as exc:
            return IsolationCheck(name="sandbox run", ok=False, detail=str(exc))
        wrote = spec.shared_dir.joinpath(word).exists()
    if result.stop_type is not StopType.NORMAL or result.output.strip() != word or not wrote:
        detail = (
            f"a sandbox ran and ended with {result.stop_type.name}: {result.error or result.output[:200]!r}"
        )
        return IsolationCheck(name="sandbox run", ok=False, detail=detail)
    return IsolationCheck(
        name="sandbox run",
        ok=True,
        detail=f"code ran in {result.duration_seconds * 1e3:.1f} ms; the start took"
        f" {started_seconds * 1e3:.1f} ms",
    )


def _guards_are_blind(sandbox: Sandbox, settings: SandboxSettings) -> IsolationCheck | None:
    """Read the sandbox's processes as guards do; None when that works or the kernel enforces all limits.

    Needed because the run that follows ends before the first check of its guards.
    """
    if sandbox.memory_bounded and settings.shared_storage == "image":
        return None
    try:
        hold_of_all(sandbox.processes, root=sandbox.spec.shared_dir)
    except OSError as exc:
        return IsolationCheck(
            name="sandbox run",
            ok=False,
            detail=f"the processes of a sandbox cannot be read ({exc.strerror}: {exc.filename})",
            fix="give this service CAP_SYS_PTRACE, run it as an ordinary user, or let the kernel enforce all"
            " limits (control groups and NEKRO_SANDBOX__SHARED_STORAGE=image)",
        )
    return None


def _spec(base: Path, settings: SandboxSettings, user: UserHold) -> SandboxSpec:
    # The code's user must be able to enter the directory of the two below.
    base.chmod(0o711)
    spec = SandboxSpec(
        shared_dir=base / "shared",
        uploads_dir=base / "uploads",
        uid=user.uid,
    )
    for directory in (spec.shared_dir, spec.uploads_dir):
        directory.mkdir()
    prepare_directories(
        shared_dir=spec.shared_dir, uploads_dir=spec.uploads_dir, uid=spec.uid, settings=settings
    )
    return spec


async def _no_methods(call: StubCall) -> StubResult:
    raise SandboxError(f"the probe has no method {call.token}")


def build_driver(settings: SandboxSettings) -> SandboxDriver:
    """Return the driver that the settings name, without checking that it works."""
    match settings.driver:
        case "auto" | "bwrap":
            return BwrapDriver(settings)
        case "landlock":
            return LandlockDriver(settings)
        case "unsafe":
            return UnsafeDriver(settings)
        case "container":
            return ContainerDriver(settings)


async def describe(settings: SandboxSettings, *, shared_root: Path | None = None) -> Capability:
    """Return the isolation and limits of the configured driver here; does not raise for missing ones.

    Args:
        shared_root: parent of the shared directories; None where it is not known: they count as unbounded.
    """
    driver = build_driver(settings)
    capability = await _describe(driver, settings, shared_root)
    forked = await check_fork_server(driver, settings) if capability.ok else None
    return (
        capability if forked is None else dataclasses.replace(capability, checks=(*capability.checks, forked))
    )


async def choose_driver(
    settings: SandboxSettings, *, shared_root: Path | None = None, hash_seed: int = 0
) -> SandboxDriver:
    """Return the driver that the settings name, after it has run a sandbox.

    ``auto`` means bubblewrap only: a service that cannot isolate code refuses to run it instead of
    isolating it less.

    Raises:
        SandboxUnavailableError: it does not work here; names every reason with its fix.
    """
    driver = build_driver(settings)
    driver.hash_seed = hash_seed
    capability = await _describe(driver, settings, shared_root)
    if not capability.ok:
        raise SandboxUnavailableError("; ".join(capability.reasons))
    return driver


async def _describe(driver: SandboxDriver, settings: SandboxSettings, shared_root: Path | None) -> Capability:
    capability = await probe(driver, settings)
    if not capability.ok:
        return capability
    limits = (*await driver.limits(), *await asyncio.to_thread(other_limits, settings, shared_root))
    if settings.require_kernel_limits:
        limits = tuple(dataclasses.replace(limit, required=True) for limit in limits)
    return dataclasses.replace(capability, limits=limits)
