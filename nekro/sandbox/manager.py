"""The public interface of this package: start sandboxes, and run code in them. A sandbox serves one run."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import Awaitable, Callable, Collection
from functools import partial
from pathlib import Path
from typing import Final, TypeVar
from weakref import WeakValueDictionary

from loguru import logger

from broker_config.settings import SandboxSettings
from nekro.base.metrics import metrics
from nekro.base.tasks import clean_up_timeout
from nekro.sandbox.driver import Sandbox, SandboxDriver, SandboxSpec
from nekro.sandbox.drivers.fork_server import imports_packages
from nekro.sandbox.drivers.selection import build_driver, choose_driver
from nekro.sandbox.images import drop_idle, is_bounded, mount_and_hold
from nekro.sandbox.leftovers import end_orphans, sweep_homes
from nekro.sandbox.models import (
    GONE_SECONDS,
    HOST_TOKEN_PREFIX,
    Dispatch,
    Raised,
    RunRequest,
    RunResult,
    StubCall,
    StubMethod,
    StubResult,
)
from nekro.sandbox.packages.base import read_base
from nekro.sandbox.packages.builder import IMPORTER, PackageService, builder_settings
from nekro.sandbox.packages.layers import FleetLayers, LayerPublisher
from nekro.sandbox.run import SandboxRun
from nekro.sandbox.run_files import RunAreas, RunFiles
from nekro.sandbox.shared import Hold, SharedCleaner
from nekro.sandbox.undo import forget_changes, has_originals, note_ends, undo_changes
from nekro.sandbox.users import UserHold, hold_user, prepare_directories
from nekro_agent.durations import DEFER_SECONDS
from nekro_agent.errors import NekroError, SandboxError

__all__ = [
    "SandboxManager",
]


_Result = TypeVar("_Result")
#: A container key that no chat has.
_EXAMPLE_KEY: Final = "start"

_CODE_BYTES: Final = 1 << 20


class SandboxManager:
    """Starts and ends sandboxes; one per process, on one event loop."""

    def __init__(
        self,
        settings: SandboxSettings,
        areas: RunAreas,
        *,
        packages_dir: Path | None = None,
        fleet_layers: Callable[[LayerPublisher], FleetLayers] | None = None,
        driver: SandboxDriver | None = None,
        hash_seed: int = 0,
        waiting: Callable[[], Awaitable[Collection[str]]] | None = None,
    ) -> None:
        """
        Args:
            waiting: returns the container keys of chats whose programs go on later, so that their files are
                not removed as idle ones; None: there are none.
            packages_dir: where package layers are kept; None disables packages.
            fleet_layers: returns the layers of all hosts; None: they share ``packages_dir``.
            driver: None selects it by the settings in ``start``.
            hash_seed: as in ``SandboxDriver``, of a driver that is selected.
        """
        self._settings = settings
        self._areas = areas
        self._directories = areas.on_host
        self._driver = driver
        self._hash_seed = hash_seed
        self._packages_dir = packages_dir
        self._fleet_layers = fleet_layers
        self._packages: PackageService | None = None
        self._slots = asyncio.Semaphore(settings.max_concurrent)
        #: Weak, because over time there are many chats, but few run at once.
        self._containers: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._running: dict[str, SandboxRun] = {}
        self._ending: set[asyncio.Task[None]] = set()
        self._in_images = settings.shared_storage == "image"
        self._cleaner = SharedCleaner(
            idle_seconds=settings.shared_idle_seconds,
            drop_idle=drop_idle if self._in_images else None,
            kept=waiting,
        )

    async def start(self) -> None:
        """Select the driver and check it by running a sandbox.

        Raises:
            SandboxUnavailableError: the configured driver cannot isolate code here; the message
                lists every reason with its fix. There is no fallback to less isolation.
        """
        await asyncio.to_thread(_sweep_leftovers)
        if self._driver is None:
            self._driver = await choose_driver(
                self._settings, shared_root=self._shared_root(), hash_seed=self._hash_seed
            )
        if self._packages_dir is not None:
            builder = build_driver(builder_settings(self._settings))
            self._packages = PackageService(
                self._settings, builder, self._packages_dir, fleet=self._fleet_layers
            )
        self._cleaner.start()

    async def close(self) -> None:
        """End every run, and start no more."""
        for run in list(self._running.values()):
            run.stop()
        with contextlib.suppress(TimeoutError):
            async with clean_up_timeout(GONE_SECONDS):
                for _ in range(self._settings.max_concurrent):
                    await self._slots.acquire()
        await self._cleaner.close()
        if self._packages is not None:
            await self._packages.close()
        if self._driver is not None:
            await self._driver.close()

    async def run(self, request: RunRequest) -> RunResult:
        """Run one piece of code and return how it ended.

        At most ``max_concurrent`` runs at a time in this process, and one per container key; the
        others wait. Cancelling kills the sandbox. A run counts until its sandbox is closed, which may
        be shortly after its result.

        Raises:
            SandboxUnavailableError: no sandbox could be started; no code was run.
            NotUndoneError: an earlier attempt has changed files in a way that cannot be undone; as above.
            SandboxError: the request is wrong: too much code, or a token given twice or malformed.
        """
        methods = _methods_by_token(request)
        if len(request.code.encode("utf-8", "surrogatepass")) > _CODE_BYTES:
            raise SandboxError(f"the code has more than {_CODE_BYTES} bytes")
        turn = self._containers.setdefault(request.container_key, asyncio.Lock())
        async with contextlib.AsyncExitStack() as held:
            await held.enter_async_context(turn)
            await held.enter_async_context(self._slots)
            begin = time.monotonic()
            sandbox, files = await self._start(request, held)
            start = "forked" if sandbox.is_forked else "cold"
            metrics().sandbox_starts.labels(start).inc()
            metrics().sandbox_start_seconds.labels(start).observe(time.monotonic() - begin)
            run = SandboxRun(sandbox, request, settings=self._settings, driver=self._started_driver.name)
            self._running[request.run_id] = run
            try:
                result = await run.execute(
                    methods=methods,
                    dispatch=files.around(request.dispatch),
                    host_methods={IMPORTER.token: self._importer(request, sandbox)},
                )
                metrics().sandbox_runs.labels(result.stop_type.name).inc()
            finally:
                self._running.pop(request.run_id, None)
            if run.rest is not None and files.are_exchanged:
                await run.rest.aclose()  # processes that still run could change what is committed
            elif run.rest is not None:
                held.push_async_exit(run.rest)
                ending = asyncio.create_task(_close_later(held.pop_all()), name="sandbox-ending")
                self._ending.add(ending)
                ending.add_done_callback(self._ending.discard)
            committed = await files.committed(result)
            if request.on_output is not None and (note := committed.output[len(result.output) :]):
                request.on_output(note)
            return committed

    async def forget(
        self, program_id: str, *, chat_key: str, container_key: str, fence: int | None = None
    ) -> None:
        """Remove what was saved for another attempt at a program (``RunRequest.program_id``): there is none.

        Call it when the result is recorded: a process that dies before runs the program again. What a failure
        leaves is removed when it is among the oldest.
        """
        directory = self._directories.shared_dir(container_key)
        if not has_originals(directory):
            return
        forget = partial(forget_changes, directory, program_id)
        try:
            await self._in_area(forget, chat_key=chat_key, container_key=container_key, fence=fence)
        except NekroError as exc:
            logger.bind(program_id=program_id, error=str(exc)).warning("sandbox_originals_not_removed")

    async def note_ends(
        self, program_id: str, *, chat_key: str, container_key: str, fence: int | None = None
    ) -> None:
        """Note how a program that waits has left its files, so that changes of others are not undone.

        Call it before its end is recorded.
        """
        directory = self._directories.shared_dir(container_key)
        if not has_originals(directory):
            return
        note = partial(note_ends, directory, program_id)
        try:
            async with self._containers.setdefault(container_key, asyncio.Lock()):  # its processes have ended
                await self._in_area(note, chat_key=chat_key, container_key=container_key, fence=fence)
        except (NekroError, OSError) as exc:
            logger.bind(program_id=program_id, error=str(exc)).warning("sandbox_ends_not_noted")

    async def _in_area(
        self, change: Callable[[], None], *, chat_key: str, container_key: str, fence: int | None
    ) -> None:
        """Change what was saved of a program, on a thread, and commit it where files are in a store."""
        async with self._areas.for_run(chat_key, container_key, fence=fence) as used:
            await _uncancelled(asyncio.to_thread(change))
            if used is not None:
                await used.push()

    def stop(self, run_id: str) -> bool:
        """End a run at an operator's request (stop type MANUAL); False when it does not run here."""
        run = self._running.get(run_id)
        if run is None:
            return False
        run.stop()
        return True

    def _shared_root(self) -> Path:
        example = self._directories.shared_dir(_EXAMPLE_KEY)
        with contextlib.suppress(OSError):
            example.rmdir()
        return example.parent

    @property
    def _started_driver(self) -> SandboxDriver:
        if self._driver is None:
            raise SandboxError("the sandbox manager has not been started; await start() first")
        return self._driver

    def _importer(self, request: RunRequest, sandbox: Sandbox) -> Dispatch:
        async def answer(call: StubCall) -> StubResult:
            if self._packages is None:
                return Raised(error_type="PackageInstallError", message="this service offers no packages")
            return await self._packages.answer(
                call, container_key=request.container_key, mounted=sandbox.spec.layers
            )

        return answer

    def _layers(self, container_key: str) -> tuple[Path, ...]:
        """Return the chat's own packages, which come first, then those of all sandboxes."""
        own = self._packages.layers(container_key) if self._packages else ()
        base = read_base(self._settings)
        return own if base is None else (*own, base.path)

    async def _start(self, request: RunRequest, held: contextlib.AsyncExitStack) -> tuple[Sandbox, RunFiles]:
        """Start a sandbox, and keep its files in use as long as ``held``."""
        if self._packages is not None:
            await self._packages.bring(request.container_key)
        with contextlib.ExitStack() as holds:
            spec = await _uncancelled(asyncio.to_thread(self._furnish, request, holds))
            self._cleaner.add(spec.shared_dir.parent)
            # After the directories were given to the host user: files that are brought become the user's.
            files = RunFiles(
                await held.enter_async_context(
                    self._areas.for_run(request.chat_key, request.container_key, fence=request.fence)
                )
            )
            if request.program_id is not None and has_originals(spec.shared_dir):
                await _uncancelled(asyncio.to_thread(undo_changes, spec.shared_dir, request.program_id))
            sandbox = await self._started_driver.start(spec)
            sandbox.on_close.append(holds.pop_all().close)
        return sandbox, files

    def _furnish(self, request: RunRequest, holds: contextlib.ExitStack) -> SandboxSpec:
        """Prepare the host user and the shared directory of a sandbox, and hold both."""
        container_key = request.container_key
        user = holds.enter_context(hold_user(container_key, settings=self._settings))
        if self._in_images:
            shared_dir = self._directories.shared_dir(container_key)
            holds.callback(mount_and_hold(shared_dir, self._settings).release)
        spec = self._spec(request, user)
        if not self._in_images:
            holds.callback(Hold(spec.shared_dir).release)
        return spec

    def _spec(self, request: RunRequest, user: UserHold) -> SandboxSpec:
        container_key = request.container_key
        spec = SandboxSpec(
            shared_dir=self._directories.shared_dir(container_key),
            uploads_dir=self._directories.uploads_dir(request.chat_key),
            uid=user.uid,
            preload=self._settings.preload,
            layers=self._layers(container_key),
            # A chat's own packages may be other versions of those that a template has imported.
            may_fork=not (self._packages and self._packages.layers(container_key)),
            imports_packages=imports_packages((request.code, *request.variables.values())),
        )
        spec = dataclasses.replace(spec, shared_bounded=is_bounded(spec.shared_dir, self._settings))
        prepare_directories(
            shared_dir=spec.shared_dir,
            uploads_dir=spec.uploads_dir,
            uid=spec.uid,
            settings=self._settings,
        )
        return spec


def _methods_by_token(request: RunRequest) -> dict[str, StubMethod]:
    """Return what a run may call: the request's methods, and those of the host."""
    methods: dict[str, StubMethod] = {}
    for method in request.methods:
        if method.token in methods:
            raise SandboxError("two methods of a run have the same token")
        if method.token.startswith(HOST_TOKEN_PREFIX):
            raise SandboxError(f"the token {method.token!r} of {method.path} is one of the host's")
        methods[method.token] = method
    return {**methods, IMPORTER.token: IMPORTER}


def _sweep_leftovers() -> None:
    """End processes and remove directories of killed services; the driver removes control groups."""
    if ended := end_orphans():
        logger.bind(count=ended).warning("sandbox_orphans_ended")
    sweep_homes()


async def _close_later(rest: contextlib.AsyncExitStack) -> None:
    try:
        await asyncio.sleep(DEFER_SECONDS)
    finally:  # also when this task is cancelled, so that the sandbox is closed
        try:
            await rest.aclose()
        except Exception:  # this task is not awaited
            logger.exception("sandbox_not_removed")


async def _uncancelled(work: Awaitable[_Result]) -> _Result:
    """Wait for work on a thread even when cancelled: it cannot be stopped, and acquires holds."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise
