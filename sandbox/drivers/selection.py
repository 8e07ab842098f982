"""Choosing the driver that the settings ask for, or refusing with every reason."""

from __future__ import annotations

from broker_config.settings import SandboxSettings
from nekro_agent.errors import SandboxUnavailableError
from sandbox.drivers.base import Capability, SandboxDriver
from sandbox.drivers.bwrap import BwrapDriver
from sandbox.drivers.container import ContainerDriver
from sandbox.drivers.supervised import LandlockDriver, UnsafeDriver
from sandbox.probe import probe

__all__ = ["build_driver", "choose_driver", "describe"]


def build_driver(settings: SandboxSettings) -> SandboxDriver:
    """Return the driver that the settings name, unproven."""
    match settings.driver:
        case "auto" | "bwrap":
            return BwrapDriver(settings)
        case "landlock":
            return LandlockDriver(settings)
        case "unsafe":
            return UnsafeDriver(settings)
        case "container":
            return ContainerDriver(settings)


async def describe(settings: SandboxSettings) -> Capability:
    """Say line by line what isolation the named driver gives on this machine; never raises for that."""
    return await probe(build_driver(settings), settings)


async def choose_driver(settings: SandboxSettings) -> SandboxDriver:
    """Return the driver that the settings ask for, proven by a sandbox that it really ran.

    ``auto`` means bubblewrap and nothing else: a service that cannot isolate code refuses to
    run it instead of isolating it less.

    Raises:
        SandboxUnavailableError: it does not work here; every reason with its mend.
    """
    driver = build_driver(settings)
    capability = await probe(driver, settings)
    if not capability.ok:
        raise SandboxUnavailableError("; ".join(capability.reasons))
    return driver
