"""The template of workers: a process that imports the product and the plugins once; workers are its forks.

`nekro up` starts it, and asks it for workers. A fork becomes a child of `nekro up`, like a worker that was
started as a program. While plugins are imported, this process is replaced by forks of itself (see
``nekro.plugins.import_trials``); the first one stays as their parent, so that they remain below `nekro up`:

    nekro up
      top         only waits
        template  imports, then forks
      worker
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import select
import socket
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from broker_config.embedded import make_data_dir
from broker_config.settings import Settings
from nekro.app.extensions import loaded
from nekro.app.processes import configure_logs
from nekro.base.forks import adopt_orphans, flush_streams, run_in_fork, thread_count, wait_until_orphaned
from nekro.broker.celery.names import WORKER_MODULES
from nekro.plugins.configuration import core_config, package_policy
from nekro.plugins.import_trials import Trials
from nekro.plugins.loader import (
    PreparedPlugins,
    plugin_steps,
    prepare_imports,
)
from nekro_agent.errors import StorageUnavailableError
from workers.plugins.reload import Stamps, stamps_below

__all__ = ["MODULES", "REQUEST_BYTES", "Order", "run_template"]

#: Largest request for a worker, and most descriptors that it passes: the supervisor's socket, the output.
REQUEST_BYTES: Final = 1 << 16
_DESCRIPTORS: Final = 2
#: What every worker imports while it starts; they import the rest of it.
MODULES: Final = (
    *WORKER_MODULES,
    "nekro.broker.announcements",
    "nekro.broker.celery.consumer",
    "nekro.broker.celery.remote_control",
    "nekro.broker.celery.worker",
    "nekro.broker.delivery.connection",
    "nekro.broker.delivery.intake",
    "storage.files.areas",
    "storage.kv",
    "storage.migrate",
    "storage.repositories.timers",
    "storage.retention",
    "storage.timer_services",
    "nekro.app.approvals.chat_lines",
    "nekro.app.approvals.requests",
    "nekro.app.model_meters",
    "workers.calls.targets",
    "workers.calls.progress",
    "workers.calls.remote_hooks",
    "workers.calls.webhooks",
    "nekro.app.chats.events",
    "workers.sdk_runtime",
    "nekro.app.jobs",
    "workers.jobs.downloads",
    "workers.jobs.service",
    "nekro.app.clock_watch",
    "workers.ops.sweeper",
    "workers.ops.sweeps",
    "workers.plugins.initialisation",
    "nekro.app.catalogue",
    "workers.plugins.loop_watchdog",
    "workers.plugins.publication",
    "nekro.plugins.registry",
    "workers.plugins.reload",
    "workers.process",
    "nekro.app.rounds.intake",
    "nekro.app.rounds.stop",
)
#: Besides these, where hosts share no disk.
MODULES_OF_STORE: Final = (
    "nekro.app.areas.synced",
    "nekro.plugins.data_dirs",
    "storage.files.expiry",
    "workers.plugins.pinned_files",
)


@dataclass(frozen=True, kw_only=True)
class Order:
    """What a fork of the template is to be."""

    #: Arguments of `nekro`.
    arguments: list[str]
    supervisor_fd: int
    plugins: PreparedPlugins


def run_template(
    settings: Settings,
    requests: socket.socket,
    *,
    on_progress: Callable[[str], None],
    on_ready: Callable[[], None],
) -> Order:
    """Import what workers import, then fork a worker for each request; returns in the workers only.

    This process ends when the other end of ``requests`` closes.

    Args:
        settings: with every URL resolved.
        requests: a socket that keeps the borders of messages; see ``_Forks``.
        on_progress: called with what is done next.
        on_ready: called when requests are answered.
    """
    above = _begin_below_top()
    configure_logs(settings, lane="template", worker=f"template@{socket.gethostname()}")
    of_extensions = [one.worker.partition(":")[0] for one in loaded(settings) if one.worker is not None]
    for name in (*MODULES, *of_extensions):
        on_progress(f"loading {name}")
        importlib.import_module(name)
    make_data_dir(settings)
    if settings.files.in_store:
        _bring_configs(settings, on_progress)
    prepare_imports(data_dir=settings.data_dir, packages=package_policy(settings), core=core_config(settings))
    before = stamps_below(settings.plugins.dirs)
    steps = tuple(plugin_steps(settings.plugins.dirs, shipped=settings.plugins.load_shipped))
    trials = Trials(steps, settings.plugins.start_seconds, (requests, above), on_progress)
    trials.run()
    _leave_top(above)
    forks = _Forks(requests, above, settings, trials.prepared, before)
    gc.collect()
    gc.freeze()
    on_ready()
    return forks.serve()


def _bring_configs(settings: Settings, on_progress: Callable[[str], None]) -> None:
    on_progress("bringing the configurations of plugins")
    for name in MODULES_OF_STORE:
        importlib.import_module(name)
    from nekro.app.areas.synced import bring_configs

    if not run_in_fork(partial(bring_configs, settings)):
        raise StorageUnavailableError("the configurations of plugins were not brought; the log says why")


def _begin_below_top() -> socket.socket:
    """Go on in a child; this process only waits. Returns the child's end of what connects them."""
    top, below = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    adopt_orphans(True)
    if os.fork() == 0:
        top.close()
        return below
    below.close()
    if top.recv(1):  # the imports are done, so workers are to become children of `nekro up`
        adopt_orphans(False)
        top.send(b".")
    code = 0
    while True:
        try:
            _, status = os.wait()
        except ChildProcessError:
            os._exit(code)
        code = code or int(status != 0)


def _leave_top(above: socket.socket) -> None:
    above.send(b".")
    if not above.recv(1):
        os._exit(1)


class _Forks:
    """Answers requests for workers.

    A request is an object with ``arguments`` and the process id of the ``supervisor``, and descriptors: the
    socket to the supervisor, and standard output and error. The answer has the ``pid``, or a ``refusal``.
    """

    def __init__(
        self,
        requests: socket.socket,
        above: socket.socket,
        settings: Settings,
        prepared: PreparedPlugins,
        before: Stamps,
    ) -> None:
        self._requests, self._above = requests, above
        self._dirs, self._prepared = settings.plugins.dirs, prepared
        # Imports may have written files; those that were there are as they were imported.
        self._stamps = stamps_below(self._dirs) | before

    def serve(self) -> Order:
        """Fork a worker for each request; returns in the workers only."""
        poll = select.poll()
        for one in (self._requests, self._above):
            poll.register(one, select.POLLIN)
        while True:
            ready = [number for number, _ in poll.poll()]
            if self._above.fileno() in ready:
                os._exit(1)
            data, passed, _, _ = socket.recv_fds(self._requests, REQUEST_BYTES, _DESCRIPTORS)
            if not data:
                os._exit(0)
            request = json.loads(data)
            try:
                order = self._answer(request, passed)
            finally:
                for descriptor in passed:
                    os.close(descriptor)
            if order is not None:
                return order

    def _answer(self, request: dict[str, Any], passed: list[int]) -> Order | None:
        if thread_count() != 1:
            self._refuse("it has threads")
            return None
        if stamps_below(self._dirs) != self._stamps:
            self._refuse("plugins have changed since they were imported")
            return None
        flush_streams()
        learn, tell = os.pipe()
        between = os.fork()
        if between == 0:
            between = os.getpid()
            if os.fork():
                os._exit(0)
            os.close(learn)
            wait_until_orphaned(between)
            return self._become(request, passed, tell)
        os.close(tell)
        os.waitpid(between, 0)
        said = os.read(learn, 32)
        os.close(learn)
        if not said:
            self._refuse("its forks do not become children of the supervisor")
            return None
        self._requests.send(json.dumps({"pid": int(said)}).encode())
        return None

    def _refuse(self, reason: str) -> None:
        self._requests.send(json.dumps({"refusal": reason}).encode())

    def _become(self, request: dict[str, Any], passed: list[int], tell: int) -> Order:
        os.setsid()
        if os.getppid() != request["supervisor"]:
            os._exit(1)
        os.write(tell, str(os.getpid()).encode())
        os.close(tell)
        self._requests.close()
        self._above.close()
        channel, output = passed
        for stream in (1, 2):
            os.dup2(output, stream)
        return Order(
            arguments=list(request["arguments"]), supervisor_fd=os.dup(channel), plugins=self._prepared
        )
