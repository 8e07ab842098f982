"""Imports plugins for forks of this process, which must not share what an import opens, starts or draws.

An import cannot be undone. So each one is tried in a fork, and this process, which lacks it, waits. If the
import leaves nothing that a fork would share or lack (``nekro.base.forks``), the fork goes on with the next
plugin. Otherwise, or if the import crashes or hangs, the fork ends, and this process forks again without that
plugin; each worker imports it then, as a worker does that is no fork. Plugins that import fast share a fork.

    keeper    waits for the trial; when the trial has succeeded, it ends, and the trial is the next keeper
      trial   imports plugins
"""

from __future__ import annotations

import gc
import json
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable
from typing import Final

from nekro.base.forks import ForkWatch, flush_streams, wait_until_orphaned
from nekro.plugins.importing import Imported
from nekro.plugins.loader import (
    PreparedPlugins,
    Step,
    close_loop_of_imports,
    import_step,
    loop_of_imports,
)
from nekro.sandbox.guest.confine import children_of
from nekro_agent.core.logger import get_sub_logger
from nekro_agent.durations import PROGRESS_SECONDS

__all__ = ["Trials"]

#: Processor time of imports that is spent again if the import of a further plugin has to be undone.
_TRIAL_CPU_SECONDS: Final = 0.25
#: Largest message of a trial to its keeper.
_MESSAGE_BYTES: Final = 1 << 16
#: A plugin's import that ends by one of these was ended from outside, so each worker tries it.
_FROM_OUTSIDE: Final = frozenset({signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP})

_log = get_sub_logger("template")


class Trials:
    """Imports plugins so that this process has those, in the end, that can be shared."""

    def __init__(
        self,
        steps: tuple[Step, ...],
        patience_seconds: float,
        above: tuple[socket.socket, ...],
        on_progress: Callable[[str], None],
    ) -> None:
        """``above`` are sockets whose other ends close when this process is no longer needed."""
        self._steps, self._patience_seconds, self._above = steps, patience_seconds, above
        self._on_progress = on_progress
        self._imported: dict[str, Imported] = {}
        self._slow: set[str] = set()

    @property
    def prepared(self) -> PreparedPlugins:
        """What was imported."""
        return PreparedPlugins(steps=self._steps, imported=self._imported, slow=frozenset(self._slow))

    def run(self) -> None:
        """Import every plugin; returns in another process, with other process id, than it was called in."""
        waiting = list(self._steps)
        gc.collect()  # else files of garbage, closed while a plugin is imported, speak against that plugin
        while waiting:
            close_loop_of_imports()
            flush_streams()
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            trial = os.fork()
            if trial == 0:
                ours.close()
                waiting = self._try(waiting, theirs)
            else:
                theirs.close()
                waiting.remove(self._keep(trial, ours, waiting))
        close_loop_of_imports()

    def _try(self, waiting: list[Step], keeper: socket.socket) -> list[Step]:
        """Import plugins in this fork; returns the rest. It ends at the first one that cannot be shared."""
        above, began, tried = os.getppid(), time.process_time(), 0
        loop = loop_of_imports()
        for step in waiting:
            _tell(keeper, step=tried)
            tried += 1
            with ForkWatch() as watch:
                references = sys.getrefcount(loop)
                imported = import_step(step)
            obstacles = watch.obstacles()
            if sys.getrefcount(loop) > references:
                obstacles.append("the event loop")
            if obstacles:
                _tell(keeper, obstacles=obstacles)
                _end_below(os.getpid())
                os._exit(0)
            if imported.error is None:  # a worker may be able to import it
                self._imported[step.text] = imported
            if time.process_time() - began > _TRIAL_CPU_SECONDS:
                break
        _tell(keeper, done=True)
        keeper.close()
        wait_until_orphaned(above)
        return waiting[tried:]

    def _keep(self, trial: int, told: socket.socket, waiting: list[Step]) -> Step:
        """Wait for a trial; returns the plugin that made it fail. Ends this process if it succeeds."""
        step: Step | None = None
        obstacles: list[str] = []
        limit = 0.0
        poll = select.poll()
        for one in (told, *self._above):
            poll.register(one, select.POLLIN)
        while True:
            seconds = min(PROGRESS_SECONDS, max(0.0, limit - time.monotonic())) if step else PROGRESS_SECONDS
            ready = {number for number, _ in poll.poll(1000 * seconds)}
            if ready - {told.fileno()}:
                _end_below(os.getpid())
                os._exit(0)
            if not ready and step and time.monotonic() >= limit:
                self._slow.add(step.text)
                break
            if not ready:
                self._on_progress(step.text if step else "preparing imports")
                continue
            line = told.recv(_MESSAGE_BYTES)
            if not line:
                break
            said = json.loads(line)
            if "done" in said:
                os._exit(0)
            if "step" in said:
                step, limit = waiting[said["step"]], time.monotonic() + self._patience_seconds
                self._on_progress(step.text)
            obstacles = said.get("obstacles", obstacles)
        told.close()
        return self._failed(trial, step, obstacles)

    def _failed(self, trial: int, step: Step | None, obstacles: list[str]) -> Step:
        if step is None or step.text in self._slow:
            _end_below(os.getpid())
        _, status = os.waitpid(trial, 0)
        if step is None:
            os._exit(1)
        if step.text in self._slow:
            _log.bind(path=step.path, seconds=self._patience_seconds).info("plugin_import_not_shared")
        elif obstacles:
            _log.bind(path=step.path, reason=", ".join(obstacles)).info("plugin_import_not_shared")
        elif os.WIFSIGNALED(status) and os.WTERMSIG(status) in _FROM_OUTSIDE:
            _log.bind(path=step.path, reason="the process was killed").info("plugin_import_not_shared")
        else:
            self._refuse(step, os.waitstatus_to_exitcode(status))
        return step

    def _refuse(self, step: Step, code: int) -> None:
        """List a plugin as failed: in a worker, its import would end the worker."""
        how = f"exit code {code}" if code >= 0 else signal.Signals(-code).name
        error = f"its import ended the process with {how}"
        _log.bind(path=step.path, error=error).error("plugin_not_loaded")
        self._imported[step.text] = Imported(
            path=step.path, module="", package="", key=step.name, error=error, source=step.source
        )


def _tell(keeper: socket.socket, **values: object) -> None:
    try:
        keeper.send(json.dumps(values).encode())
    except OSError:  # it has been killed
        os._exit(1)


def _end_below(pid: int) -> None:
    for child in reversed(children_of(pid)):
        try:
            os.kill(child, signal.SIGKILL)
        except ProcessLookupError:
            continue
