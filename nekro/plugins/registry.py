"""The methods of the plugins that this process has imported: their entries, and their functions."""

from __future__ import annotations

import fnmatch
import inspect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from broker_config.settings import ApprovalSettings
from nekro.plugins.entries import CommandEntry, MethodEntry, MethodParameter, PluginEntry, WebhookEntry
from nekro.plugins.entry_registry import Registry
from nekro_agent.core.logger import get_sub_logger
from nekro_agent.errors import InvalidValueError, MethodDisabledError, MethodNotFoundError
from nekro_agent.execution.greenlets import run_callable
from nekro_agent.files import staging
from nekro_agent.methods import Lane, SandboxMethod, WebhookMethod, describe_signature, takes_context_second
from nekro_agent.mounts import LANE_ATTRIBUTE, REPEATABLE_ATTRIBUTE
from nekro_agent.plugin import NekroPlugin
from nekro_agent.schemas.agent_ctx import AgentCtx

if TYPE_CHECKING:
    from nekro.plugins.data_dirs import PluginDirs

__all__ = ["LoadedMethod", "LoadedRegistry", "LoadedWebhook"]

_log = get_sub_logger("registry")
#: Hooks that a plugin may register; ``enabled`` and ``disabled`` are lists of callbacks.
_HOOKS = (
    "init", "cleanup", "channel_reset", "user_message", "system_message", "prompt_inject",
    "collect_methods", "router",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class LoadedMethod:
    """A method of a plugin that this process has imported."""

    entry: MethodEntry
    plugin: NekroPlugin
    #: What a call runs.
    method: SandboxMethod


@dataclass(frozen=True, kw_only=True)
class LoadedWebhook:
    """A webhook of a plugin that this process has imported."""

    entry: WebhookEntry
    plugin: NekroPlugin
    #: What a request runs.
    method: WebhookMethod


class LoadedRegistry(Registry):
    """The registry of a worker; only its methods can be run in this process."""

    def __init__(
        self,
        plugins: Iterable[NekroPlugin],
        *,
        long_methods: Sequence[str] = (),
        approval: ApprovalSettings | None = None,
        dirs: PluginDirs | None = None,
    ) -> None:
        """Index the plugins' methods.

        Args:
            plugins: in the order in which they were loaded.
            long_methods: patterns of full names (``author.module.*``) that run in lane ``long``.
            approval: which methods require approval; None leaves that to the plugins.
            dirs: chooses what becomes of their data directories; None where hosts share a disk.
        """
        super().__init__(collect=self._selected)
        self._long_methods = tuple(long_methods)
        self._approval = approval or ApprovalSettings()
        self._dirs = dirs
        self._loaded = {plugin.key: plugin for plugin in plugins}
        self._methods: dict[str, LoadedMethod] = {}
        self._webhooks: dict[str, LoadedWebhook] = {}
        self.replace([self._entry(plugin) for plugin in self._loaded.values()])

    def serve(self, plugins: Iterable[NekroPlugin]) -> None:
        """Serve these plugins from now on: others, new versions, or the same in another state."""
        fresh = vars(
            LoadedRegistry(plugins, long_methods=self._long_methods, approval=self._approval, dirs=self._dirs)
        )
        # In one step, because other threads call `find` meanwhile.
        vars(self).update({name: value for name, value in fresh.items() if name != "_collect"})

    def loaded(self, entry: MethodEntry) -> LoadedMethod:
        """Return what a call of ``entry`` runs."""
        return self._methods[entry.task]

    @property
    def webhook_tasks(self) -> list[str]:
        """Names of the tasks of all webhooks, also of disabled plugins."""
        return list(self._webhooks)

    def webhook(self, task: str) -> LoadedWebhook:
        """Return the webhook of a task.

        Raises:
            MethodNotFoundError: this process has none of that name.
            MethodDisabledError: its plugin is disabled.
        """
        found = self._webhooks.get(task)
        if found is None:
            raise MethodNotFoundError(f"this worker has no webhook {task!r}")
        if not self.is_enabled(found.plugin.key):
            raise MethodDisabledError(f"webhook {task} exists, but plugin {found.plugin.key} is disabled")
        return found

    def newest(self, method: LoadedMethod) -> LoadedMethod:
        """Return the newest version of a method.

        A method that the newest version of its plugin lacks, or has with another type, stays as it was.
        """
        newest = self._methods.get(method.entry.task, method)
        return newest if newest.entry.type is method.entry.type else method

    def is_enabled(self, plugin_key: str) -> bool:
        """Whether a plugin's methods may be called; always its present state."""
        plugin = self._loaded.get(plugin_key)
        return plugin is not None and plugin.is_enabled

    def _entry(self, plugin: NekroPlugin) -> PluginEntry:
        choice = self._dirs and self._dirs.choose(plugin)
        return PluginEntry(
            key=plugin.key,
            name=plugin.name,
            module_name=plugin.module_name,
            description=plugin.description,
            version=plugin.version,
            author=plugin.author,
            url=plugin.url,
            adapters=tuple(plugin.support_adapter),
            enabled=plugin.is_enabled,
            pinned=plugin.pinned,
            files=choice.policy.value if choice else "",
            files_reason=choice.reason if choice else "",
            allow_sleep=plugin.allow_sleep if isinstance(plugin.allow_sleep, bool) else None,
            sleep_brief=str(plugin.sleep_brief or ""),
            methods=tuple(self._method(plugin, method) for method in plugin.sandbox_methods),
            commands=tuple(
                CommandEntry(
                    name=command.name,
                    plugin_key=plugin.key,
                    aliases=tuple(command.aliases),
                    permission=command.permission.value,
                    usage=command.usage,
                    description=command.description,
                    internal=command.internal,
                )
                for command in plugin.commands
            ),
            hooks=tuple(hook for hook in _HOOKS if plugin.hook(hook) is not None),
            task_types=tuple(plugin.task_types),
            webhooks=tuple(
                self._webhook(plugin, endpoint, method) for endpoint, method in plugin.webhook_methods.items()
            ),
            serves_http=plugin.hook("router") is not None or plugin.webui_path is not None,
        )

    def _webhook(self, plugin: NekroPlugin, endpoint: str, method: WebhookMethod) -> WebhookEntry:
        task = f"{plugin.key}.webhook:{endpoint}"
        lane = getattr(method.func, LANE_ATTRIBUTE, None) or Lane.METHODS
        if any(fnmatch.fnmatchcase(task, pattern) for pattern in self._long_methods):
            lane = Lane.LONG
        entry = WebhookEntry(
            endpoint=endpoint,
            task=task,
            plugin_key=plugin.key,
            label=method.name,
            description=method.description,
            lane=Lane(lane),
        )
        self._webhooks[task] = LoadedWebhook(entry=entry, plugin=plugin, method=method)
        return entry

    def _method(self, plugin: NekroPlugin, method: SandboxMethod) -> MethodEntry:
        function, name = method.func, method.func.__name__
        task = f"{plugin.key}.{name}"
        doc = (function.__doc__ or "").strip() or None
        if doc is None:
            # It is callable, but prompts do not list it.
            _log.bind(method=task, fix="add a docstring").warning("method_without_docstring")
        lane = getattr(function, LANE_ATTRIBUTE, None) or method.lane or Lane.METHODS
        if any(fnmatch.fnmatchcase(task, pattern) for pattern in self._long_methods):
            lane = Lane.LONG
        try:
            signature = inspect.signature(function)
        except (TypeError, ValueError):
            signature = None
        entry = MethodEntry(
            name=name,
            task=task,
            plugin_key=plugin.key,
            label=method.name,
            type=method.method_type,
            signature=describe_signature(function),
            doc=doc,
            lane=Lane(lane),
            repeatable=bool(getattr(function, REPEATABLE_ATTRIBUTE, False)),
            parameters=None if signature is None else _parameters(signature),
            swapped=None if signature is None else takes_context_second(signature),
            requires_approval=self._approval.requires(task, declared=method.requires_approval),
            once=method.once,
        )
        self._methods[task] = LoadedMethod(entry=entry, plugin=plugin, method=method)
        return entry

    async def _selected(
        self, plugin: PluginEntry, own: list[MethodEntry], ctx: AgentCtx
    ) -> list[MethodEntry]:
        plugin_key = plugin.key
        loaded = self._loaded[plugin_key]
        hook = loaded.hook("collect_methods")
        if hook is None:
            return own
        loaded.refresh_config()
        own_ctx = ctx.for_plugin(plugin_key)
        async with staging.call_scope(f"{plugin_key}.collect_methods", own_ctx.fs, plugin_key=plugin_key):
            chosen = await run_callable(hook, own_ctx)
        if not isinstance(chosen, list | tuple | set):
            raise InvalidValueError(
                f"{plugin_key}: mount_collect_methods must return a list, not {type(chosen).__name__}"
            )
        by_func = {self.loaded(entry).method.func: entry for entry in own}
        entries = []
        for item in chosen:
            func = item.func if isinstance(item, SandboxMethod) else item
            if func not in by_func:
                name = getattr(func, "__name__", repr(func))
                raise InvalidValueError(
                    f"{plugin_key}: mount_collect_methods returned {name}, "
                    "which is not a mounted method of this plugin"
                )
            entries.append(by_func[func])
        return entries


def _parameters(signature: inspect.Signature) -> tuple[MethodParameter, ...]:
    return tuple(
        MethodParameter(
            name=one.name,
            kind=one.kind.name,
            is_required=one.default is one.empty and one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD),
        )
        for one in signature.parameters.values()
    )
