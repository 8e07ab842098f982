"""The public interface of this package: start sandboxes, keep warm ones, and run code in them.

``prepare`` starts a sandbox for a chat during the LLM request, ``run`` runs the code in it.
A sandbox serves one run. The number and age of warm sandboxes are bounded, as each costs a few megabytes and
a process."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar
from weakref import WeakValueDictionary

from loguru import logger

from broker_config.settings import SandboxSettings
from nekro.base.metrics import metrics
from nekro.base.tasks import clean_up_timeout
from nekro.sandbox.driver import Sandbox, SandboxDriver, SandboxSpec
from nekro.sandbox.drivers.selection import build_driver, choose_driver
from nekro.sandbox.images import drop_idle, is_bounded, mount_and_hold
from nekro.sandbox.leftovers import end_orphans, sweep_homes
from nekro.sandbox.limits.guards import GUARD_SECONDS, Guards, watch
from nekro.sandbox.limits.quota import Quota
from nekro.sandbox.models import (
    GONE_SECONDS,
    HOST_TOKEN_PREFIX,
    Dispatch,
    Limit,
    Raised,
    RunRequest,
    RunResult,
    StubCall,
    StubMethod,
    StubResult,
)
from nekro.sandbox.packages.base import read_base
from nekro.sandbox.packages.builder import IMPORTER, PackageService, builder_settings
from nekro.sandbox.run import SandboxRun
from nekro.sandbox.shared import Hold, SharedCleaner
from nekro.sandbox.users import UserHold, hold_user, prepare_directories
from nekro_agent.durations import DEFER_SECONDS, FRESH_SECONDS
from nekro_agent.errors import SandboxError
from nekro_agent.ports import FileAreas

__all__ = [
    "SandboxManager",
    "WarmPool",
]


@dataclass(kw_only=True)
class _Entry:
    starting: asyncio.Task[Sandbox]
    expiry: asyncio.TimerHandle


class WarmPool:
    """Keeps started sandboxes by key until they are taken or too old."""

    def __init__(self, *, most: int, seconds: float) -> None:
        self._most = most
        self._seconds = seconds
        self._entries: dict[Hashable, _Entry] = {}
        self._retiring: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._entries)

    def prepare(self, key: Hashable, start: Callable[[], Awaitable[Sandbox]]) -> None:
        """Start a sandbox for ``key`` in the background, unless there is one or the pool is full."""
        if key in self._entries or len(self._entries) >= self._most or self._seconds <= 0:
            return

        async def starting() -> Sandbox:
            return await start()

        expiry = asyncio.get_running_loop().call_later(self._seconds, self._expire, key)
        self._entries[key] = _Entry(starting=asyncio.create_task(starting()), expiry=expiry)

    async def ready(self, key: Hashable) -> None:
        """Wait until the sandbox for ``key`` has started or failed; returns at once without one."""
        entry = self._entries.get(key)
        if entry is not None:
            await asyncio.wait([entry.starting])

    async def take(self, key: Hashable) -> Sandbox | None:
        """Return the sandbox for ``key``, waiting for its start; None when there is none that runs.

        The error of a failed start is dropped: the caller starts a sandbox and gets the error again.
        """
        entry = self._entries.pop(key, None)
        if entry is None:
            return None
        entry.expiry.cancel()
        try:
            sandbox = await asyncio.shield(entry.starting)
        except Exception:
            # The run starts its own sandbox and gets the same error.
            return None
        except asyncio.CancelledError:
            self._retire(entry)
            raise
        if not sandbox.alive:
            await sandbox.close()
            return None
        return sandbox

    async def close(self) -> None:
        """Close every waiting sandbox."""
        for key in list(self._entries):
            self._expire(key)
        while self._retiring:
            await asyncio.wait(self._retiring)

    def _expire(self, key: Hashable) -> None:
        entry = self._entries.pop(key)
        entry.expiry.cancel()
        self._retire(entry)

    def _retire(self, entry: _Entry) -> None:
        task = asyncio.create_task(_close_when_started(entry.starting))
        self._retiring.add(task)
        task.add_done_callback(self._retiring.discard)


async def _close_when_started(starting: asyncio.Task[Sandbox]) -> None:
    with contextlib.suppress(asyncio.CancelledError):
        try:
            sandbox = await starting
        except Exception as exc:
            # Only a warning: the run reports the error when it starts its own sandbox.
            logger.bind(error=str(exc)).warning("sandbox_prepare_failed")
            return
        await sandbox.close()


_Result = TypeVar("_Result")
#: A container key that no chat has.
_EXAMPLE_KEY: Final = "start"

_CODE_BYTES: Final = 1 << 20


class SandboxManager:
    """Starts, reuses and ends sandboxes; one per process, on one event loop."""

    def __init__(
        self,
        settings: SandboxSettings,
        areas: FileAreas,
        *,
        packages_dir: Path | None = None,
        driver: SandboxDriver | None = None,
    ) -> None:
        """
        Args:
            packages_dir: where package layers are kept; None disables packages.
            driver: None selects it by the settings in ``start``.
        """
        self._settings = settings
        self._areas = areas
        self._driver = driver
        self._packages_dir = packages_dir
        self._packages: PackageService | None = None
        self._pool = WarmPool(most=settings.max_concurrent, seconds=settings.warm_seconds)
        self._slots = asyncio.Semaphore(settings.max_concurrent)
        #: Weak, because over time there are many chats, but few run at once.
        self._containers: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._running: dict[str, SandboxRun] = {}
        self._ending: set[asyncio.Task[None]] = set()
        self._in_images = settings.shared_storage == "image"
        self._cleaner = SharedCleaner(
            idle_seconds=settings.shared_idle_seconds, drop_idle=drop_idle if self._in_images else None
        )

    async def start(self) -> None:
        """Select the driver and check it by running a sandbox.

        Raises:
            SandboxUnavailableError: the configured driver cannot isolate code here; the message
                lists every reason with its fix. There is no fallback to less isolation.
        """
        await asyncio.to_thread(_sweep_leftovers)
        if self._driver is None:
            self._driver = await choose_driver(self._settings, shared_root=self._shared_root())
        if self._packages_dir is not None:
            builder = build_driver(builder_settings(self._settings))
            self._packages = PackageService(self._settings, builder, self._packages_dir)
        self._cleaner.start()

    async def close(self) -> None:
        """End every run and every waiting sandbox, and start no more."""
        for run in list(self._running.values()):
            run.stop()
        with contextlib.suppress(TimeoutError):
            async with clean_up_timeout(GONE_SECONDS):
                for _ in range(self._settings.max_concurrent):
                    await self._slots.acquire()
        await self._cleaner.close()
        if self._packages is not None:
            await self._packages.close()
        await self._pool.close()
        if self._driver is not None:
            await self._driver.close()

    async def prepare(self, *, chat_key: str, container_key: str) -> None:
        """Start a sandbox for a chat before its code exists; returns when it has started or failed.

        A failure is not raised here: ``run`` starts another sandbox and raises it. Cancelling stops
        waiting, not the start; a sandbox that is not used is closed after ``warm_seconds``.
        """
        key = (chat_key, container_key)
        self._pool.prepare(key, lambda: self._start_waiting(chat_key=chat_key, container_key=container_key))
        await self._pool.ready(key)

    async def run(self, request: RunRequest) -> RunResult:
        """Run one piece of code and return how it ended.

        At most ``max_concurrent`` runs at a time in this process, and one per container key; the
        others wait. Cancelling kills the sandbox. A run counts until its sandbox is closed, which may
        be shortly after its result.

        Raises:
            SandboxUnavailableError: no sandbox could be started; no code was run.
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
            sandbox, warm = await self._sandbox_for(request)
            start = "warm" if warm else "forked" if sandbox.is_forked else "cold"
            metrics().sandbox_starts.labels(start).inc()
            metrics().sandbox_start_seconds.labels(start).observe(time.monotonic() - begin)
            run = SandboxRun(
                sandbox, request, settings=self._settings, driver=self._started_driver.name, warm=warm
            )
            self._running[request.run_id] = run
            try:
                result = await run.execute(
                    methods=methods,
                    dispatch=request.dispatch,
                    host_methods={IMPORTER.token: self._importer(request, sandbox)},
                )
                metrics().sandbox_runs.labels(result.stop_type.name).inc()
            finally:
                self._running.pop(request.run_id, None)
            if run.rest is not None:
                held.push_async_exit(run.rest)
                ending = asyncio.create_task(_close_later(held.pop_all()), name="sandbox-ending")
                self._ending.add(ending)
                ending.add_done_callback(self._ending.discard)
            return result

    def stop(self, run_id: str) -> bool:
        """End a run at an operator's request (stop type MANUAL); False when it does not run here."""
        run = self._running.get(run_id)
        if run is None:
            return False
        run.stop()
        return True

    def _shared_root(self) -> Path:
        example = self._areas.shared_dir(_EXAMPLE_KEY)
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

    async def _sandbox_for(self, request: RunRequest) -> tuple[Sandbox, bool]:
        waiting = await self._pool.take((request.chat_key, request.container_key))
        if waiting is not None:
            for action in waiting.on_take:
                action()
            if waiting.spec.layers == self._layers(request.container_key):
                return waiting, True
            await waiting.close()  # a package was added since it was started
        return await self._start(chat_key=request.chat_key, container_key=request.container_key), False

    async def _start_waiting(self, *, chat_key: str, container_key: str) -> Sandbox:
        """Start a sandbox with guards while it waits, as it may preload modules of a chat's own package."""
        sandbox = await self._start(chat_key=chat_key, container_key=container_key)
        try:
            await self._guard_waiting(sandbox)
        except BaseException:
            await sandbox.close()
            raise
        return sandbox

    async def _guard_waiting(self, sandbox: Sandbox) -> None:
        quota = None
        if not sandbox.spec.shared_bounded:
            quota = await asyncio.to_thread(Quota.at_start, sandbox.spec.shared_dir, self._settings)

        def end(limit: Limit, error: str | None) -> None:
            logger.bind(limit=limit.value, error=error).warning("sandbox_waiting_ended")
            sandbox.kill()

        guards = Guards(
            alive=lambda: sandbox.alive,
            end=end,
            bound_seconds=GUARD_SECONDS + FRESH_SECONDS,
        )
        sandbox.on_take.append(guards.stop)
        sandbox.on_close.append(guards.stop)
        watch(guards, sandbox, quota, self._settings, every_seconds=FRESH_SECONDS)

    async def _start(self, *, chat_key: str, container_key: str) -> Sandbox:
        with contextlib.ExitStack() as holds:
            spec = await _uncancelled(asyncio.to_thread(self._furnish, chat_key, container_key, holds))
            self._cleaner.add(spec.shared_dir.parent)
            sandbox = await self._started_driver.start(spec)
            sandbox.on_close.append(holds.pop_all().close)
        return sandbox

    def _furnish(self, chat_key: str, container_key: str, holds: contextlib.ExitStack) -> SandboxSpec:
        """Prepare the host user and the shared directory of a sandbox, and hold both."""
        user = holds.enter_context(hold_user(container_key, settings=self._settings))
        if self._in_images:
            shared_dir = self._areas.shared_dir(container_key)
            holds.callback(mount_and_hold(shared_dir, self._settings).release)
        spec = self._spec(chat_key, container_key, user)
        if not self._in_images:
            holds.callback(Hold(spec.shared_dir).release)
        return spec

    def _spec(self, chat_key: str, container_key: str, user: UserHold) -> SandboxSpec:
        spec = SandboxSpec(
            shared_dir=self._areas.shared_dir(container_key),
            uploads_dir=self._areas.uploads_dir(chat_key),
            uid=user.uid,
            preload=self._settings.preload,
            layers=self._layers(container_key),
            # A chat's own packages may be other versions of those that a template has imported.
            may_fork=not (self._packages and self._packages.layers(container_key)),
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
