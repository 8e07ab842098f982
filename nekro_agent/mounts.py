"""Decorators that register a plugin's sandbox methods, commands, background jobs and hooks."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

from nekro_agent.commands.registration import Command, CommandGroup, kept
from nekro_agent.commands.schemas import CommandPermission
from nekro_agent.core.logger import get_sub_logger
from nekro_agent.errors import InvalidValueError
from nekro_agent.methods import (
    Lane,
    PromptInjectMethod,
    SandboxMethod,
    SandboxMethodType,
    WebhookMethod,
    describe_signature,
)

if TYPE_CHECKING:
    from nekro_agent.schemas.agent_ctx import AgentCtx

__all__ = [
    "LANE_ATTRIBUTE",
    "REPEATABLE_ATTRIBUTE",
    "PluginMounts",
    "long_running",
    "repeatable",
    "task_owner_keys",
    "task_owners",
]

F = TypeVar("F", bound=Callable[..., Any])

#: Attribute of a function that :func:`long_running` sets; other hosts ignore it.
LANE_ATTRIBUTE: Final = "__nekro_lane__"
#: The same for :func:`repeatable`.
REPEATABLE_ATTRIBUTE: Final = "__nekro_repeatable__"

_log = get_sub_logger("plugin")

#: Task type → plugins that mounted it; two plugins may use the same name.
_owners: Final[defaultdict[str, list[PluginMounts]]] = defaultdict(list)


def long_running(func: F) -> F:
    """Mark a sandbox method as long: it runs in lane ``long``, outside of ordinary methods' event loop.

    The order with ``mount_sandbox_method`` does not matter.
    """
    setattr(func, LANE_ATTRIBUTE, Lane.LONG)
    return func


def repeatable(func: F) -> F:
    """Mark a sandbox method that may run twice without harm, for example a download.

    When a worker dies during a call of it, another worker runs it again. Without the mark the outcome
    is reported as unknown to the caller or the chat; TOOL methods need no mark.
    """
    setattr(func, REPEATABLE_ATTRIBUTE, True)
    return func


def task_owners(task_type: str) -> list[PluginMounts]:
    """Return the plugins of this process that mounted a task type, in the order of mounting."""
    return list(_owners.get(task_type, ()))


def task_owner_keys() -> set[str]:
    """Return the keys of the plugins of this process that mounted a task type."""
    return {plugin.key for owners in _owners.values() for plugin in owners}


class PluginMounts:
    """The decorators of a plugin and its registrations."""

    @property
    def key(self) -> str:
        """``<author>.<module_name>``."""
        raise NotImplementedError

    @property
    def package(self) -> str:
        """Import name of the package or module that holds all code of the plugin."""
        raise NotImplementedError

    def mount_sandbox_method(
        self,
        method_type: SandboxMethodType | str,
        name: str,
        description: str = "",
        *,
        lane: Lane | str | None = None,
        requires_approval: bool = False,
    ) -> Callable[[F], F]:
        """Register a method that sandboxed code can call; the function is returned unchanged.

        The first positional argument of the function receives the ``AgentCtx``, whatever its
        name. Sandboxed code calls it by the function's name.

        Args:
            method_type: determines what happens to the result, see :class:`SandboxMethodType`.
            name: label for people; also callable if it is an unused identifier.
            lane: queue of the calls, ``"long"`` for downloads and other long work; None leaves it
                to the installation.
            requires_approval: whether a person must approve each call before it runs, for example of a
                method that spends money. The installation may exempt the method, or require approval
                for others.

        Raises:
            InvalidValueError: the type or the lane does not exist.
        """
        kind = _checked_member(SandboxMethodType, method_type)
        queue = None if lane is None else _checked_member(Lane, lane)
        if queue is Lane.PINNED:
            raise InvalidValueError(f"{self.key}: plugins are pinned as a whole: set plugin.pinned = True")

        def decorate(func: F) -> F:
            if not callable(func) or not hasattr(func, "__name__"):
                raise TypeError(f"{self.key}: mount_sandbox_method needs a function, not {func!r}")
            with contextlib.suppress(AttributeError):  # a bound method accepts no attributes
                func._method_type = kind  # type: ignore[attr-defined]  # plugins of the reference read it
            if func.__name__ in self._methods:
                _log.bind(plugin=self.key, method=func.__name__).warning("method_registration_replaced")
            self._methods[func.__name__] = SandboxMethod(
                method_type=kind,
                name=name,
                description=description,
                func=func,
                lane=queue,
                requires_approval=requires_approval,
            )
            return func

        return decorate

    @property
    def sandbox_methods(self) -> list[SandboxMethod]:
        """Every registered method, in order of registration."""
        return list(self._methods.values())

    def mount_collect_methods(self) -> Callable[[F], F]:
        """Register ``async (ctx) -> list`` that selects the methods of a chat."""
        return self._slot("collect_methods")

    async def render_sandbox_methods_prompt(self, ctx: AgentCtx) -> str:
        """Return the prompt's text about this plugin's methods: name, signature, docstring."""
        collect = self.hook("collect_methods")
        chosen = await collect(ctx) if collect is not None else self.sandbox_methods
        functions = [item.func if isinstance(item, SandboxMethod) else item for item in chosen]
        return "\n".join(
            f"* {func.__name__}{describe_signature(func)}\n{func.__doc__.strip()}"
            for func in functions
            if func.__doc__
        )

    # -- commands and background jobs ---------------------------------------------------------

    def mount_command(
        self,
        name: str,
        description: str,
        aliases: list[str] | None = None,
        permission: CommandPermission | None = None,
        usage: str = "",
        category: str = "plugin",
        tags: list[str] | None = None,
        internal: bool = False,
        i18n_description: dict[str, str] | None = None,
        i18n_usage: dict[str, str] | None = None,
        i18n_category: dict[str, str] | None = None,
    ) -> Callable[[F], F]:
        """Register ``async (context, …) -> CommandResponse``, or an async generator of responses.

        Args:
            permission: None means every known user.
            internal: not listed; for ``CmdCtl.wait(callback_cmd=…)``.
        """

        def decorate(func: F) -> F:
            self.add_command(
                Command(
                    name=name,
                    description=description,
                    aliases=tuple(aliases or ()),
                    permission=permission or CommandPermission.USER,
                    usage=usage,
                    category=category,
                    tags=tuple(tags or ()),
                    internal=internal,
                    func=func,
                    i18n_description=i18n_description,
                    i18n_usage=i18n_usage,
                    i18n_category=i18n_category,
                )
            )
            return func

        return decorate

    def mount_command_group(
        self,
        name: str,
        description: str,
        permission: CommandPermission | None = None,
        category: str = "plugin",
        tags: list[str] | None = None,
    ) -> CommandGroup:
        """Return a group; its commands are named ``<name>.<command>``."""
        level = permission or CommandPermission.USER
        return CommandGroup(self, name, description, permission=level, category=category, tags=tags)

    def add_command(self, command: Command) -> None:
        """Register a command, instead of an earlier one of the plugin that has its name."""
        self.commands[:] = [one for one in self.commands if one.name != command.name]
        self.commands.append(command)

    def adopt_commands(self) -> None:
        """Register the commands that modules of this plugin registered without naming it."""
        for command in kept(self.package):
            self.add_command(command)

    def mount_async_task(self, task_type: str, *, restarts: bool = True) -> Callable[[F], F]:
        """Register a background job: ``async (handle, …)``, or an async generator of ``TaskCtl``.

        The type belongs to this plugin; another plugin may use the same name.

        Args:
            restarts: whether another worker starts a job from its beginning when its worker died;
                with False the job fails then, for work that must not be done twice.
        """

        def decorate(func: F) -> F:
            self.task_types[task_type] = func
            self.once_only_tasks.discard(task_type)
            if not restarts:
                self.once_only_tasks.add(task_type)
            _record_owner(task_type, self)
            return func

        return decorate

    def claim_task_types(self) -> None:
        """Own this plugin's task types again, after another version of it was imported and dropped."""
        for task_type in self.task_types:
            _record_owner(task_type, self)

    # -- hooks ----------------------------------------------------------------------------

    def mount_init_method(self) -> Callable[[F], F]:
        """Register ``async () -> None`` that runs once per process after loading."""
        return self._slot("init")

    def mount_cleanup_method(self) -> Callable[[F], F]:
        """Register ``async () -> None`` that runs when the process or the plugin stops."""
        return self._slot("cleanup")

    def mount_on_channel_reset(self) -> Callable[[F], F]:
        """Register ``async (ctx) -> None`` that runs when a chat is reset."""
        return self._slot("channel_reset")

    def mount_on_user_message(self) -> Callable[[F], F]:
        """Register ``async (ctx, ChatMessage) -> MsgSignal | None`` that receives each user message."""
        return self._slot("user_message")

    def mount_on_message(self) -> Callable[[F], F]:
        """Like :meth:`mount_on_user_message`, under its v1 name."""
        return self._slot("user_message")

    def mount_on_system_message(self) -> Callable[[F], F]:
        """Register ``async (ctx, str) -> MsgSignal | None`` that receives each system message."""
        return self._slot("system_message")

    def mount_prompt_inject_method(self, name: str, description: str = "") -> Callable[[F], F]:
        """Register ``async (ctx) -> str`` whose text is added to the prompt of every round."""
        mount = self._slot("prompt_inject")

        def decorate(func: F) -> F:
            self._inject_labels = (name, description)
            return mount(func)

        return decorate

    @property
    def prompt_inject_method(self) -> PromptInjectMethod | None:
        """The registered function that adds to the prompt, with its name and description."""
        func = self.hook("prompt_inject")
        return None if func is None else PromptInjectMethod(*self._inject_labels, func)

    def mount_router(self) -> Callable[[F], F]:
        """Register a function that returns a FastAPI ``APIRouter``, served by an HTTP process."""
        return self._slot("router")

    def mount_webhook_method(self, endpoint: str, name: str, description: str = "") -> Callable[[F], F]:
        """Register ``async (ctx)`` that serves a webhook; ``ctx.webhook_request`` is the request."""

        def decorate(func: F) -> F:
            self.webhook_methods[endpoint] = WebhookMethod(name=name, description=description, func=func)
            return func

        return decorate

    def on_enabled(self) -> Callable[[F], F]:
        """Register ``async () -> None`` that runs after init, and when an operator enables the plugin.

        It pins the plugin to one process of the fleet. When another process takes the plugin over, it runs
        there again.
        """
        return self._listener(self.enabled_callbacks)

    def on_disabled(self) -> Callable[[F], F]:
        """Register ``async () -> None`` that runs when an operator disables the plugin."""
        return self._listener(self.disabled_callbacks)

    def reset_methods(self) -> None:
        """Remove every registration; used before a reload."""
        self._methods: dict[str, SandboxMethod] = {}
        self._slots: dict[str, Callable[..., Any]] = {}
        self.commands: list[Command] = []
        self.task_types: dict[str, Callable[..., Any]] = {}
        #: Task types whose jobs fail when their worker dies.
        self.once_only_tasks: set[str] = set()
        self.webhook_methods: dict[str, WebhookMethod] = {}
        self._inject_labels = ("", "")
        self.enabled_callbacks: list[Callable[[], Any]] = []
        self.disabled_callbacks: list[Callable[[], Any]] = []

    def hook(self, slot: str) -> Callable[..., Any] | None:
        """Return the function registered as ``init``, ``cleanup``, ``channel_reset``, …; for the host."""
        return self._slots.get(slot)

    def _slot(self, slot: str) -> Callable[[F], F]:
        def decorate(func: F) -> F:
            if slot in self._slots:
                _log.bind(plugin=self.key, hook=slot).warning("hook_registration_replaced")
            self._slots[slot] = func
            return func

        return decorate

    @staticmethod
    def _listener(listeners: list[Callable[[], Any]]) -> Callable[[F], F]:
        def decorate(func: F) -> F:
            listeners.append(func)
            return func

        return decorate


def _record_owner(task_type: str, plugin: PluginMounts) -> None:
    owners = _owners[task_type]
    owners[:] = [owner for owner in owners if owner.key != plugin.key]
    owners.append(plugin)


E = TypeVar("E", SandboxMethodType, Lane)


def _checked_member(kind: type[E], value: object) -> E:
    try:
        return kind(cast("str", value))
    except ValueError:
        choices = ", ".join(member.value for member in kind)
        raise InvalidValueError(
            f"{kind.__name__} {value!r} does not exist; choose one of {choices}"
        ) from None
