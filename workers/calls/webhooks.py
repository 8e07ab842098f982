"""Webhooks of plugins on a worker. A webhook has effects, so each of its tasks runs at most once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pydantic_core import PydanticSerializationError, to_jsonable_python

from nekro.base.redaction import Redactor
from nekro.plugins.invoke import Outcome
from nekro.plugins.registry import LoadedRegistry, LoadedWebhook
from nekro.wire.author_frames import AuthorFrame
from nekro.wire.invocation import Invocation
from nekro.wire.values import Arguments
from nekro_agent.execution.current import Payer, current_account, paying
from nekro_agent.execution.greenlets import run_callable
from nekro_agent.files import staging
from nekro_agent.plugin import using
from nekro_agent.schemas.agent_ctx import AgentCtx, WebhookRequest
from workers.calls.claims import TaskSubject
from workers.calls.handler import CallTarget, OnStep, places_in_plugin
from workers.plugins.loop_watchdog import LoopWatchdog

__all__ = ["WebhookTargets"]


class WebhookTargets:
    """Finds the webhooks that calls name; one instance per worker process."""

    def __init__(
        self,
        registry: LoadedRegistry,
        *,
        home_of: Callable[[str], str | None],
        watchdog: LoopWatchdog | None = None,
    ) -> None:
        """Create the targets.

        Args:
            home_of: the queue of a plugin that another process owns; None if this process may run it.
        """
        self.registry = registry
        self.home_of = home_of
        self.watchdog = watchdog

    def find(self, invocation: Invocation) -> CallTarget:
        """Return the webhook that a call names.

        Raises:
            MethodNotFoundError, MethodDisabledError: as their names say.
        """
        return _Webhook(self.registry.webhook(invocation.method), self)


class _Webhook(CallTarget):
    """One webhook, and the services of the process that runs it."""

    is_claimed = True

    def __init__(self, loaded: LoadedWebhook, targets: WebhookTargets) -> None:
        self._loaded, self._targets = loaded, targets
        entry = loaded.entry
        self.subject = TaskSubject(name=entry.endpoint, plugin_key=entry.plugin_key, lane=entry.lane)

    def home(self, arguments: Arguments) -> str | None:
        return self._targets.home_of(self.subject.plugin_key)

    async def run(self, invocation: Invocation, arguments: Arguments, on_step: OnStep) -> Outcome:
        """Run the webhook; the value is what it returned, as JSON data."""
        (headers, body), _ = arguments
        loaded, watchdog = self._loaded, self._targets.watchdog
        loaded.plugin.refresh_config()
        context = await AgentCtx.create_by_webhook(WebhookRequest(headers=headers, body=body))
        with using(loaded.plugin), paying(Payer(plugin_key=loaded.plugin.key, account_id=current_account())):
            label, key = self.subject.name, loaded.plugin.key
            work = _called(label, loaded.method.func, context.for_plugin(key), plugin_key=key)
            if watchdog is None:
                value = await work
            else:
                value = await watchdog.follow(
                    loaded.entry, work, remaining_seconds=invocation.remaining_seconds(), on_step=on_step
                )
        return Outcome(type=self.subject.type, value=_plain(value))

    def places(self, error: Exception, redactor: Redactor) -> tuple[AuthorFrame, ...]:
        return places_in_plugin(error, self._loaded.method.func, redactor)


async def _called(label: str, function: Callable[..., Any], context: AgentCtx, *, plugin_key: str) -> object:
    async with staging.call_scope(label, plugin_key=plugin_key):
        return await run_callable(function, context)


def _plain(value: object) -> Any:
    """Return a result as JSON data; what JSON cannot express becomes its text."""
    try:
        return to_jsonable_python(value, fallback=str)
    except (PydanticSerializationError, ValueError, RecursionError):
        return str(value)
