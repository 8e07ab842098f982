"""Serve package requests of sandboxed code: policy, one build per requirement, the answer."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Final

from loguru import logger

from broker_config.settings import SandboxSettings
from nekro.base.tasks import end_tasks
from nekro.sandbox.driver import SandboxDriver
from nekro.sandbox.models import HOST_TOKEN_PREFIX, Raised, Returned, StubCall, StubMethod, StubResult
from nekro.sandbox.packages.builder import BUILD_SECONDS, LayerBuilder, builder_settings
from nekro.sandbox.packages.layers import Built, LayerStore
from nekro.sandbox.packages.requirement import Requirement, check_policy, parse_requirement
from nekro.wire.values import decode_arguments, encode_value
from nekro_agent.errors import NekroError, PackageInstallError, SandboxError
from nekro_agent.methods import SandboxMethodType

__all__ = ["IMPORTER", "PackageService"]

#: The method behind ``dynamic_importer``; answered by the host, not by a plugin.
IMPORTER: Final = StubMethod(
    token=f"{HOST_TOKEN_PREFIX}dynamic_importer",
    name=None,
    path="host.packages.dynamic_importer",
    signature="(package_spec: str)",
    doc=None,
    type=SandboxMethodType.TOOL,
    timeout_seconds=BUILD_SECONDS,
)
#: The argument is a package's name, the value names its modules.
_ARGUMENT_BYTES: Final = 1 << 16
_RETURN_BYTES: Final = 1 << 20


class PackageService:
    """Answers ``dynamic_importer``; one per process."""

    def __init__(self, settings: SandboxSettings, driver: SandboxDriver, directory: Path) -> None:
        """
        Args:
            driver: starts builder sandboxes; made with ``builder_settings``.
            directory: where layers are kept; may be shared by all processes of a host.
        """
        self._settings = settings
        self._store = LayerStore(directory)
        self._builder = LayerBuilder(builder_settings(settings), driver, self._store)
        self._one_at_a_time = asyncio.Semaphore(1)
        self._builds: dict[str, asyncio.Task[Built]] = {}

    def layers(self, container_key: str) -> tuple[Path, ...]:
        """Return the layers that the next sandbox of a container key mounts."""
        return tuple(self._store.path(digest) for digest in self._store.chosen(container_key))

    async def close(self) -> None:
        """Stop builds."""
        await end_tasks(*self._builds.values())

    async def answer(self, call: StubCall, *, container_key: str, mounted: tuple[Path, ...]) -> StubResult:
        """Answer one call of ``dynamic_importer``.

        Args:
            mounted: the layers of the sandbox that asks.
        """
        try:
            (text,), _ = decode_arguments(call.arguments, max_bytes=_ARGUMENT_BYTES)
            if not isinstance(text, str):
                raise TypeError
            built = await self._provide(parse_requirement(text))
            self._store.choose(container_key, built.digest)
        except (PackageInstallError, SandboxError) as exc:
            return Raised(error_type=type(exc).__name__, message=str(exc))
        except (ValueError, TypeError):
            return Raised(error_type="ArgumentError", message="dynamic_importer takes one package name")
        ready = self._store.path(built.digest) in mounted
        answer = {"ready": ready, "modules": built.modules, "name": built.name, "version": built.version}
        return Returned(value=encode_value(answer, max_bytes=_RETURN_BYTES))

    async def _provide(self, requirement: Requirement) -> Built:
        check_policy(requirement, self._settings)
        if built := await asyncio.to_thread(self._store.find, requirement):
            return built
        key = str(requirement)
        if key not in self._builds:
            task = asyncio.create_task(self._build(requirement))
            task.add_done_callback(lambda _: self._builds.pop(key, None))
            self._builds[key] = task
        # A cancelled caller does not cancel the build: the next run finds the layer.
        return await asyncio.shield(self._builds[key])

    async def _build(self, requirement: Requirement) -> Built:
        async with self._one_at_a_time:
            try:
                built = await self._builder.build(requirement)
            except NekroError as exc:
                logger.bind(requirement=str(requirement), error=str(exc)).warning("sandbox_package_failed")
                raise
        logger.bind(requirement=str(requirement), digest=built.digest).info("sandbox_package_built")
        return built
