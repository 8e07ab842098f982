"""Sandbox methods as targets of calls."""

from __future__ import annotations

from collections.abc import Callable

from nekro.app.chats.contexts import context_of
from nekro.base.redaction import Redactor
from nekro.plugins.registry import LoadedMethod, LoadedRegistry
from nekro.wire.invocation import Invocation
from nekro.wire.values import Arguments
from nekro_agent.execution.author_frames import AuthorFrame
from nekro_agent.execution.current_call import CurrentCall, serving
from nekro_agent.execution.invoke import Outcome, call_method
from nekro_agent.execution.payer import Payer, paying
from nekro_agent.execution.uses import using
from workers.calls.failures import explained, places_in_plugin
from workers.calls.handler import CallTarget, OnStep
from workers.calls.progress import CallReports
from workers.plugins.loop_watchdog import LoopWatchdog

__all__ = ["MethodTargets"]


class MethodTargets:
    """Finds the methods that calls name; one instance per worker process."""

    def __init__(
        self,
        *,
        registry: LoadedRegistry,
        reports: CallReports,
        home_of: Callable[[str], str | None],
        watchdog: LoopWatchdog | None = None,
    ) -> None:
        """Create the targets.

        Args:
            home_of: the queue of a plugin that another process owns; None if this process may run it.
        """
        self.registry = registry
        self.reports = reports
        self.home_of = home_of
        self.watchdog = watchdog

    def find(self, invocation: Invocation) -> CallTarget:
        """Return the method that a call names.

        Raises:
            MethodNotFoundError, MethodDisabledError: as their names say.
        """
        return _Method(self.registry.loaded(self.registry.find(invocation.method)), self)


class _Method(CallTarget):
    """One method, and the services of the process that runs it."""

    def __init__(self, loaded: LoadedMethod, targets: MethodTargets) -> None:
        self._loaded, self._targets = loaded, targets
        self.subject = loaded.entry
        self.is_claimed = loaded.entry.is_claimed

    def home(self, arguments: Arguments) -> str | None:
        return self._targets.home_of(self.subject.plugin_key)

    async def run(self, invocation: Invocation, arguments: Arguments, on_step: OnStep) -> Outcome:
        # The plugin may have been reloaded since the call was found.
        loaded, watchdog = self._targets.registry.newest(self._loaded), self._targets.watchdog
        entry = loaded.entry
        loaded.plugin.refresh_config()
        with (
            using(loaded.plugin),
            serving(_ids(invocation)),
            paying(_payer(invocation, entry.plugin_key)),
            self._targets.reports.following(entry, invocation) as on_progress,
        ):
            ctx = context_of(
                invocation,
                user_id=invocation.user_id,
                plugin_key=entry.plugin_key,
                call_id=invocation.call_id,
                round_id=invocation.round_id,
                on_progress=on_progress,
            )
            work = call_method(loaded.method, ctx, *arguments)
            if watchdog is None:
                return await work
            return await watchdog.follow(
                entry, work, remaining_seconds=invocation.remaining_seconds(), on_step=on_step
            )

    def explained(self, error: Exception, arguments: Arguments) -> Exception:
        return explained(error, self._loaded.method.func, *arguments)

    def places(self, error: Exception, redactor: Redactor) -> tuple[AuthorFrame, ...]:
        return places_in_plugin(error, self._loaded.method.func, redactor)


def _payer(invocation: Invocation, plugin_key: str) -> Payer:
    return Payer(
        plugin_key=plugin_key,
        chat_key=invocation.chat_key,
        user_id=invocation.user_id,
        adapter_key=invocation.adapter_key,
        turn_id=invocation.turn_id,
        account_id=invocation.account_id,
    )


def _ids(invocation: Invocation) -> CurrentCall:
    return CurrentCall(
        call_id=invocation.call_id,
        chat_key=invocation.chat_key,
        round_id=invocation.round_id,
        turn_id=invocation.turn_id,
    )
