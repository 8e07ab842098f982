"""The supervisor of `nekro up`: start workers, Flower and Redis, restart them, stop them in order."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Final

from broker_config.embedded import EmbeddedRedis
from broker_config.settings import Settings
from nekro.base.tasks import end_tasks
from nekro.cli.environment import environment_of
from nekro.cli.output import Output
from nekro.cli.services.ownership import Ownership
from nekro.cli.services.process import GATEWAY, ChildProcess, ChildSpec, addresses, describe_exit
from nekro.cli.services.system import entries, stop_seconds
from nekro.cli.services.worker_processes import WorkerTemplate, is_crash, release_calls
from nekro_agent.durations import FRESH_SECONDS
from nekro_agent.errors import BrokerError, NekroError, ServiceError
from nekro_agent.methods import Lane

__all__ = ["RestartPauses", "Supervisor"]

#: Most calls that are named when their worker has ended.
_MOST_NAMES: Final = 5


@dataclass
class RestartPauses:
    """Pauses before restarts: exponential, reset after a long run."""

    first_seconds: float = 0.5
    most_seconds: float = 30.0
    #: A process that ran for this long resets the pause.
    good_seconds: float = 60.0
    _next_seconds: float = 0.0

    def after(self, lived_seconds: float) -> float:
        """Return the seconds to pause after a process that ran for ``lived_seconds``."""
        if lived_seconds >= self.good_seconds or not self._next_seconds:
            self._next_seconds = self.first_seconds
        pause = self._next_seconds
        self._next_seconds = min(self.most_seconds, pause * 2)
        return pause


class _Prefixed:
    """Prints a child's lines, each prefixed with the child's name."""

    def __init__(self, output: Output, prefix: str) -> None:
        self._output = output
        self._prefix = prefix

    def write(self, line: str) -> None:
        """Print one line."""
        self._output.words(self._prefix + line)

    def close(self) -> None:
        """Nothing to release."""


class Supervisor:
    """Starts child processes, restarts those that end, stops all in order."""

    def __init__(
        self, specs: Sequence[ChildSpec], settings: Settings, *, ownership: Ownership, output: Output
    ) -> None:
        """Create a supervisor; ``settings`` must have every URL filled."""
        self._specs = specs
        self._settings = settings
        self._ownership = ownership
        self._output = output
        self._environment = environment_of(settings)
        self._children: dict[str, ChildProcess] = {}
        self._stop = asyncio.Event()
        self._interrupts = 0
        self._api_url = ""
        self._is_ready = False
        self._template: WorkerTemplate | None = None
        self._width = max((len(spec.name) for spec in specs), default=0)

    async def run(self, *, embedded: bool) -> None:
        """Keep everything running until Ctrl-C or SIGTERM.

        Args:
            embedded: whether to restart the Redis of the data directory when it does not answer.

        Raises:
            ServiceError: a child did not become ready at the first start.
        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._interrupted)
        try:
            await self._until_stopped(self._start_all())
            if self._stop.is_set():
                return
            self._is_ready = True
            self._publish()
            self._output.words(f"ready: {self._ready()}; Ctrl-C stops")
            await self._watch(embedded=embedded)
        finally:
            self._ownership.withdraw()
            await self._stop_all()
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)

    def _ready(self) -> str:
        names = ", ".join(spec.name for spec in self._specs if spec.name != GATEWAY)
        served = self._api_url and addresses(self._api_url, self._settings)
        return "; ".join(part for part in (names, served) if part)

    async def _until_stopped(self, work: Coroutine[Any, Any, None]) -> None:
        """Await ``work``, cancelled when a stop is requested; raises the errors of ``work``."""
        task = asyncio.create_task(work)
        stopped = asyncio.create_task(self._stop.wait())
        await asyncio.wait([task, stopped], return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        if task.done():
            await task
            return
        await end_tasks(task)

    async def _start_all(self) -> None:
        """Start everything; the workers as forks of a template, which starts beside the gateway."""
        workers = [spec for spec in self._specs if spec.lane]
        for spec in self._specs:
            if not spec.lane:
                await self._start(spec)
        if len(workers) > 1:
            await self._start_template()
        for spec in workers:
            await self._start(spec)
        await asyncio.gather(*(self._become_ready(spec) for spec in self._specs))

    async def _start_template(self) -> None:
        try:
            self._template = await WorkerTemplate.start(
                environment=self._environment, sink=self._sink("template"), on_wait=self._say_wait
            )
        except (ServiceError, OSError) as exc:
            self._output.words(f"the workers do not share their imports: {exc}")

    async def _end_template(self, reason: str) -> None:
        """Start workers without the template from now on."""
        template, self._template = self._template, None
        if template is not None:
            self._output.words(f"workers that are restarted import for themselves from now on: {reason}")
            await template.close()

    async def _become_ready(self, spec: ChildSpec) -> None:
        """Wait until a child is ready; a fork that crashes or hangs is started again as a program.

        Raises:
            ServiceError: it did not become ready.
        """
        child = self._children[spec.name]
        try:
            node = await child.ready(on_wait=self._say_wait)
        except ServiceError as exc:
            if not spec.lane or self._template is None or (child.exit_code or -1) > 0:
                raise
            await self._end_template(str(exc))
            await child.stop(warm_seconds=0)
            node = await (await self._start(spec)).ready(on_wait=self._say_wait)
        if spec.name == GATEWAY:
            self._api_url = node

    def _say_wait(self, text: str) -> None:
        self._output.words(text)
        if not self._is_ready:
            self._ownership.progress(text)

    async def _start(self, spec: ChildSpec) -> ChildProcess:
        sink = self._sink(spec.name)
        child = await self._forked(spec, sink) if spec.lane else None
        if child is None:
            child = await ChildProcess.start(spec, environment=self._environment, directory=None, sink=sink)
        self._children[spec.name] = child
        return child

    async def _forked(self, spec: ChildSpec, sink: _Prefixed) -> ChildProcess | None:
        if self._template is None:
            return None
        try:
            return await self._template.fork(spec, sink=sink)
        except (ServiceError, TimeoutError) as exc:
            await self._end_template(str(exc) or "the template of workers does not answer")
            return None

    def _sink(self, name: str) -> _Prefixed:
        prefix = "" if self._settings.log.json_lines else f"{name:<{self._width}} | "
        return _Prefixed(self._output, prefix)

    async def _watch(self, *, embedded: bool) -> None:
        tasks = [asyncio.create_task(self._keep(spec)) for spec in self._specs]
        if embedded:
            tasks.append(asyncio.create_task(self._keep_redis()))
        try:
            await self._stop.wait()
        finally:
            await end_tasks(*tasks)

    async def _keep(self, spec: ChildSpec) -> None:
        backoff = RestartPauses()
        while True:
            started = time.monotonic()
            code = await self._children[spec.name].wait()
            pause = backoff.after(time.monotonic() - started)
            if spec.name == GATEWAY:
                self._publish()  # commands do without it
            if spec.lane and is_crash(code):  # a library may not have survived the fork
                await self._end_template(f"{spec.name} ended with {describe_exit(code)}")
            self._output.words(f"{spec.name} ended with {describe_exit(code)}; restarting in {pause:.1f} s")
            await self._release_calls(self._children[spec.name], code)
            await asyncio.sleep(pause)
            await self._start(spec)
            try:
                await self._become_ready(spec)
            except ServiceError as exc:
                # The next iteration reports its end and doubles the pause.
                self._output.words(str(exc))
                await self._children[spec.name].stop(warm_seconds=0)
                continue
            self._publish()
            self._output.words(f"{spec.name} restarted (process {self._children[spec.name].pid})")

    async def _release_calls(self, child: ChildProcess, code: int) -> None:
        try:
            calls = (await release_calls(self._settings, child, code)).calls
        except NekroError as exc:  # their leases expire
            self._output.words(f"calls of {child.spec.name} are not released: {exc}")
            return
        if calls:
            names = ", ".join(f"{call.task} ({call.call_id})" for call in calls[:_MOST_NAMES])
            more = f" and {len(calls) - _MOST_NAMES} more" if len(calls) > _MOST_NAMES else ""
            self._output.words(f"{child.spec.name} ran {names}{more}")

    async def _keep_redis(self) -> None:
        redis = EmbeddedRedis(self._settings.data_dir)
        try:
            while True:
                await asyncio.sleep(FRESH_SECONDS)
                if await asyncio.to_thread(redis.answers):
                    continue
                self._output.words("the embedded Redis does not answer; restarting it")
                redis.stop()
                with contextlib.suppress(BrokerError):
                    await asyncio.to_thread(redis.start)
        finally:
            redis.stop()

    async def _stop_all(self) -> None:
        """Stop requests and rounds first: while they end, they may still call methods."""
        children = list(self._children.values())
        self._output.words("stopping; Ctrl-C again stops at once")
        callers = [child for child in children if _calls(child.spec)]
        others = [child for child in children if not _calls(child.spec)]
        seconds = stop_seconds(self._settings)
        if self._template is not None:
            await self._template.close()
        for group in (callers, others):
            if self._interrupts > 1:
                seconds = 0
            await asyncio.gather(*(child.stop(warm_seconds=seconds) for child in group))

    def _interrupted(self) -> None:
        self._interrupts += 1
        self._stop.set()
        if self._interrupts > 1:
            number = signal.SIGQUIT if self._interrupts == 2 else signal.SIGKILL
            for child in self._children.values():
                child.signal(number)

    def _publish(self) -> None:
        from nekro.gateway.access.keys import is_local as takes_local_key

        alive = [child for child in self._children.values() if child.exit_code is None]
        workers = [child for child in alive if child.spec.lane]
        serves = any(child.spec.name == GATEWAY for child in alive)
        url = self._api_url if serves and takes_local_key(self._settings) else ""
        self._ownership.publish(command="up", workers=entries(workers), gateway_url=url)


def _calls(spec: ChildSpec) -> bool:
    return spec.lane == Lane.ROUNDS or spec.name == GATEWAY
