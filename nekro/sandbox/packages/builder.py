"""Build package layers for sandboxed code that requests them: policy, one build per requirement, the answer.

pip runs in a sandbox of its own, without network and without a chat's files.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, Final

from loguru import logger

from broker_config.settings import SandboxSettings
from nekro.base.tasks import end_tasks
from nekro.sandbox.driver import SandboxDriver, SandboxSpec
from nekro.sandbox.models import (
    HOST_TOKEN_PREFIX,
    Raised,
    Returned,
    RunRequest,
    RunResult,
    StopType,
    StubCall,
    StubMethod,
    StubResult,
)
from nekro.sandbox.packages.index import IndexGateway
from nekro.sandbox.packages.layers import (
    Built,
    FleetLayers,
    LayerPublisher,
    Requirement,
    check_policy,
    parse_requirement,
)
from nekro.sandbox.run import SandboxRun
from nekro.sandbox.users import UserHold, hold_user, make_readable, prepare_directories
from nekro.wire.values import decode_arguments, encode_value
from nekro_agent.durations import PROGRAM_SECONDS
from nekro_agent.errors import InvalidValueError, NekroError, PackageInstallError, SandboxError, StorageError
from nekro_agent.execution.tied_process import tied_to_this_process
from nekro_agent.files import safe_files
from nekro_agent.files.private_files import make_directory
from nekro_agent.methods import SandboxMethodType
from nekro_agent.tools.task_groups import in_thread

__all__ = [
    "IMPORTER",
    "LayerBuilder",
    "PackageService",
    "builder_settings",
]

_KEY: Final = "package builder"
_MOST_BYTES: Final = 1 << 30
_REPORT_BYTES: Final = 16 << 20
#: Time limit of one installation; large wheels are unpacked, checked and compiled in minutes.
BUILD_SECONDS: Final = 600
_ERROR_CHARS: Final = 1500
#: Arguments are names and numbers; values include pages of an index, which are long.
_ARGUMENT_BYTES: Final = 1 << 16
_RETURN_BYTES: Final = 64 << 20

#: Asks pip for its index, as that depends on its configuration files, its variables and its default.
_INDEX_QUESTION: Final = (
    "from pip._internal.commands import create_command;"
    "print(create_command('download').parser.get_default_values().index_url)"
)


def builder_settings(settings: SandboxSettings) -> SandboxSettings:
    """Return the settings of builder sandboxes: the same isolation, larger limits."""
    return settings.model_copy(
        update={
            "wall_seconds": BUILD_SECONDS,
            "cpu_seconds": BUILD_SECONDS,
            "memory_bytes": max(settings.memory_bytes, 1 << 30),
            "max_file_bytes": _MOST_BYTES,
            "shared_bytes": 4 * _MOST_BYTES,
            "shared_files": 200_000,
            "max_calls": 2000,
            "return_bytes": _RETURN_BYTES,
            "preload": (),
            "package_allow": (),
        }
    )


class LayerBuilder:
    """Builds layers, one at a time per call of ``build``."""

    def __init__(self, settings: SandboxSettings, driver: SandboxDriver, store: LayerPublisher) -> None:
        """
        Args:
            driver: made with ``builder_settings``.
        """
        self._settings = settings
        self._driver = driver
        self._store = store
        self._index_url: str | None = None

    async def build(self, requirement: Requirement) -> Built:
        """Install a requirement from wheels and publish it.

        Raises:
            PackageInstallError: it cannot be installed; the message ends with the installer's error.
        """
        # Files are copied, hashed and removed on threads: a layer may have many, and runs use this loop.
        base = await in_thread(self._store.new_work_dir)
        try:
            with hold_user(_KEY, settings=self._settings) as user:
                return await self._build(requirement, await in_thread(self._spec, base, user))
        finally:
            await in_thread(shutil.rmtree, base, True)

    async def _build(self, requirement: Requirement, spec: SandboxSpec) -> Built:
        index_url = await in_thread(self._index)
        gateway = IndexGateway(index_url, directory=spec.uploads_dir, most_bytes=_MOST_BYTES)
        result = await self._install(requirement, spec, gateway)
        if result.stop_type is not StopType.NORMAL:
            raise PackageInstallError(f"{requirement} cannot be installed: {_last_words(result)}")
        return await in_thread(self._publish, requirement, spec.shared_dir, gateway.downloaded)

    def _publish(self, requirement: Requirement, shared_dir: Path, wheels: Mapping[str, str]) -> Built:
        return self._store.publish(
            shared_dir / "layer",
            requirement,
            version=_installed_version(shared_dir, requirement),
            wheels=wheels,
            most_bytes=_MOST_BYTES,
        )

    async def _install(self, requirement: Requirement, spec: SandboxSpec, gateway: IndexGateway) -> RunResult:
        answers: dict[str, Callable[..., Awaitable[object]]] = {
            "index_page": gateway.page,
            "wheel": gateway.wheel,
            "requirement": _constant(str(requirement)),
        }

        async def dispatch(call: StubCall) -> StubResult:
            return await _answer(answers[call.token], call.arguments)

        request = RunRequest(
            run_id=f"build-{secrets.token_hex(4)}",
            chat_key=_KEY,
            container_key=_KEY,
            code=_install_code(),
            methods=[_host_method(name) for name in answers],
            dispatch=dispatch,
        )
        sandbox = await self._driver.start(spec)
        run = SandboxRun(sandbox, request, settings=self._settings, driver=self._driver.name)
        return await run.execute(methods={m.token: m for m in request.methods}, dispatch=dispatch)

    def _spec(self, base: Path, user: UserHold) -> SandboxSpec:
        spec = SandboxSpec(
            shared_dir=base / "shared",
            uploads_dir=base / "wheels",
            uid=user.uid,
            layers=(self._installer(),),
            loopback=True,
            may_fork=False,
        )
        for directory in (spec.shared_dir, spec.uploads_dir):
            make_directory(directory, passable=True)
        prepare_directories(
            shared_dir=spec.shared_dir,
            uploads_dir=spec.uploads_dir,
            uid=spec.uid,
            settings=self._settings,
        )
        return spec

    def _installer(self) -> Path:
        """Return a directory that contains only pip."""
        found = importlib.util.find_spec("pip")
        if found is None or not found.submodule_search_locations:
            raise PackageInstallError("packages cannot be built: pip is missing where the service runs")
        source = Path(found.submodule_search_locations[0])
        stamp = f"{source.stat().st_mtime_ns:x}"
        target = self._store.root / "tools" / f"pip-{stamp}"
        if not target.is_dir():
            make_directory(target.parent, passable=True)
            staging = target.with_name(f".{target.name}-{secrets.token_hex(4)}")
            shutil.copytree(source, staging / "pip", ignore=shutil.ignore_patterns("__pycache__"))
            make_readable(staging)
            staging.rename(target)
        return target

    def _index(self) -> str:
        if self._index_url is None:
            self._index_url = self._settings.package_index or _index_of_pip()
        return self._index_url


def _install_code() -> str:
    return (Path(__file__).parent.parent / "guest" / "install.py").read_text("utf-8")


def _host_method(name: str) -> StubMethod:
    return StubMethod(
        token=name,
        name=name,
        path=f"host.packages.{name}",
        signature="(*args)",
        doc=None,
        type=SandboxMethodType.TOOL,
        timeout_seconds=BUILD_SECONDS,
    )


def _constant(value: str) -> Callable[[], Awaitable[object]]:
    async def answer() -> object:
        return value

    return answer


async def _answer(method: Callable[..., Awaitable[object]], arguments: bytes) -> StubResult:
    try:
        args, _ = decode_arguments(arguments, max_bytes=_ARGUMENT_BYTES)
        value = await method(*args)
    except (NekroError, TypeError, ValueError, AttributeError) as exc:
        return Raised(error_type=type(exc).__name__, message=str(exc))
    return Returned(value=encode_value(value, max_bytes=_RETURN_BYTES))


def _installed_version(shared_dir: Path, requirement: Requirement) -> str:
    from packaging.utils import canonicalize_name

    try:
        report: dict[str, Any] = json.loads(
            safe_files.read_file(shared_dir, "report.json", max_bytes=_REPORT_BYTES)
        )
        for item in report["install"]:
            if canonicalize_name(str(item["metadata"]["name"])) == requirement.name:
                return str(item["metadata"]["version"])
    except (OSError, InvalidValueError, ValueError, KeyError, TypeError) as exc:
        raise PackageInstallError(f"{requirement}: the installer left no report") from exc
    raise PackageInstallError(f"{requirement}: the installer did not install it")


def _last_words(result: RunResult) -> str:
    if result.limit:
        return f"{result.limit.value} limit reached"
    lines = [line for line in result.output.split("\n") if line.strip()]
    errors = [line for line in lines if "ERROR:" in line or "Error:" in line]
    return " ".join(errors or lines[-1:])[:_ERROR_CHARS] or str(result.error)


def _index_of_pip() -> str:
    """Return the index that pip uses here."""
    try:
        answer = subprocess.run(  # noqa: S603 - our own interpreter
            tied_to_this_process(sys.executable, "-c", _INDEX_QUESTION),
            capture_output=True,
            text=True,
            timeout=PROGRAM_SECONDS,
            check=True,
            env={**os.environ},
            start_new_session=True,
        )
    except (OSError, subprocess.SubprocessError) as exc:
        raise PackageInstallError(
            "no package index is known; configure one for pip (PIP_INDEX_URL or pip.conf)"
        ) from exc
    return answer.stdout.strip()


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
_IMPORT_RETURN_BYTES: Final = 1 << 20


class PackageService:
    """Answers ``dynamic_importer``; one per process."""

    def __init__(
        self,
        settings: SandboxSettings,
        driver: SandboxDriver,
        directory: Path,
        *,
        fleet: Callable[[LayerPublisher], FleetLayers] | None = None,
    ) -> None:
        """
        Args:
            driver: starts builder sandboxes; made with ``builder_settings``.
            directory: where layers are kept; may be shared by all processes of a host.
            fleet: returns the layers of all hosts; None: they share ``directory``.
        """
        self._settings = settings
        self._store = LayerPublisher(directory)
        self._fleet = None if fleet is None else fleet(self._store)
        self._builder = LayerBuilder(builder_settings(settings), driver, self._store)
        self._one_at_a_time = asyncio.Semaphore(1)
        self._builds: dict[str, asyncio.Task[Built]] = {}

    def layers(self, container_key: str) -> tuple[Path, ...]:
        """Return the layers that the next sandbox of a container key mounts."""
        return tuple(self._store.path(digest) for digest in self._store.chosen(container_key))

    async def bring(self, container_key: str) -> None:
        """Give this host the layers that another host chose for a container key."""
        if self._fleet is not None and self._settings.package_allow:
            await self._fleet.bring(container_key)

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
            if self._fleet is not None:
                await self._fleet.choose(container_key, built.digest)
        except (PackageInstallError, SandboxError, StorageError) as exc:
            return Raised(error_type=type(exc).__name__, message=str(exc))
        except (ValueError, TypeError):
            return Raised(error_type="ArgumentError", message="dynamic_importer takes one package name")
        ready = self._store.path(built.digest) in mounted
        answer = {"ready": ready, "modules": built.modules, "name": built.name, "version": built.version}
        return Returned(value=encode_value(answer, max_bytes=_IMPORT_RETURN_BYTES))

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
                if self._fleet is not None and (built := await self._fleet.find(requirement)):
                    return built
                built = await self._builder.build(requirement)
                if self._fleet is not None:
                    await self._fleet.keep(requirement, built)
            except NekroError as exc:
                logger.bind(requirement=str(requirement), error=str(exc)).warning("sandbox_package_failed")
                raise
        logger.bind(requirement=str(requirement), digest=built.digest).info("sandbox_package_built")
        return built
