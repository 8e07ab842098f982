"""Select the driver that the settings name, or refuse it with all reasons."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path

from broker_config.settings import SandboxSettings
from nekro.sandbox.driver import Capability, SandboxDriver
from nekro.sandbox.drivers.bwrap import BwrapDriver
from nekro.sandbox.drivers.container import ContainerDriver
from nekro.sandbox.drivers.supervised import LandlockDriver, UnsafeDriver
from nekro.sandbox.limits.enforcement import other_limits
from nekro.sandbox.probe import probe
from nekro_agent.errors import SandboxUnavailableError

__all__ = ["build_driver", "choose_driver", "describe"]


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
    return await _describe(build_driver(settings), settings, shared_root)


async def choose_driver(settings: SandboxSettings, *, shared_root: Path | None = None) -> SandboxDriver:
    """Return the driver that the settings name, after it has run a sandbox.

    ``auto`` means bubblewrap only: a service that cannot isolate code refuses to run it instead of
    isolating it less.

    Raises:
        SandboxUnavailableError: it does not work here; names every reason with its fix.
    """
    driver = build_driver(settings)
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
