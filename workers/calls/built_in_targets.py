"""The built-in methods as targets of calls, among them `read_rest`, which returns texts that a prompt shows
cut."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Final

from nekro.agent.model import PluginBrief, TextPart
from nekro.agent.multimodal import render_segments
from nekro.agent.prompt import collect_injected
from nekro.app.catalogue import WAIT_TASKS, built_in_entry
from nekro.app.chats.writer import context_of
from nekro.app.rounds.sleeping_plugins import MOST_TURNS, may_sleep, wake
from nekro.plugins.entries import MethodEntry
from nekro.plugins.entry_registry import Registry
from nekro.plugins.hooks import PluginHost
from nekro.plugins.invoke import Outcome
from nekro.sandbox.models import StopType
from nekro.wire.invocation import Invocation
from nekro.wire.values import Arguments
from nekro_agent.errors import ArgumentError, MethodNotFoundError
from nekro_agent.methods import SandboxMethodType
from nekro_agent.schemas.agent_ctx import AgentCtx
from storage.engine import Database
from storage.repositories.rounds import Round
from storage.states import TriggerKind
from storage.transaction import Transaction
from workers.calls.handler import CallTarget, OnStep
from workers.calls.method_help import ChatPlugin, help_text, plugin_text, plugins_of_chat, search, similar

__all__ = [
    "MOST_CHARS",
    "BuiltInTargets",
    "rest_of",
]


#: Most characters of one answer.
MOST_CHARS: Final = 1_000_000


async def rest_of(
    transaction: Transaction, chat_key: str, handle: object, *, start: object, most: object
) -> str:
    """Return ``most`` characters from ``start`` of the text that a handle of ``nekro.agent.text``
    names.

    Raises:
        ArgumentError: the chat has no such text, or no longer; an argument is not a number in its range.
    """
    begin = _number("start", start, least=0)
    length = _number("most", most, least=1, largest=MOST_CHARS)
    text = await _find(transaction, chat_key, handle) if isinstance(handle, str) else None
    if text is None:
        raise ArgumentError(f"read_rest: this chat has no text {str(handle)[:80]!r}, or has deleted it")
    return text[begin : begin + length]


async def _find(transaction: Transaction, chat_key: str, handle: str) -> str | None:
    kind, _, name = handle.partition(":")
    if kind == "message":
        message = await transaction.messages.find(name)
        is_ours = message is not None and message.chat_key == chat_key and not message.is_hidden
        return message.text if message is not None and is_ours else None
    name, _, part = name.partition("#")
    found, text_of = await _round(transaction, kind, name)
    if found is None or found.chat_key != chat_key:
        return None
    return text_of(found, part)


async def _round(
    transaction: Transaction, kind: str, name: str
) -> tuple[Round | None, Callable[[Round, str], str | None]]:
    if kind == "round":
        return await transaction.rounds.find(name), _output
    if kind == "call":
        return await transaction.rounds.find_by_trigger(TriggerKind.CALL, name), _result
    return None, _output


def _output(found: Round, part: str) -> str | None:
    # Prompts do not show this output either: it may contain the confidential text itself.
    return None if part or found.stop_type == StopType.SECURITY else found.output


def _result(found: Round, part: str) -> str | None:
    if not part:
        return found.observation
    parts = render_segments(found.segments, image_bytes=0) if found.segments is not None else []
    shown = parts[int(part)] if part.isdecimal() and len(part) < 4 and int(part) < len(parts) else None
    return shown.text if isinstance(shown, TextPart) else None


def _number(name: str, value: object, *, least: int, largest: int | None = None) -> int:
    is_number = isinstance(value, int) and not isinstance(value, bool)
    if not isinstance(value, int) or not is_number or value < least or (largest and value > largest):
        reach = f"from {least} to {largest}" if largest else f">= {least}"
        raise ArgumentError(f"read_rest: {name}={str(value)[:80]} must be a number {reach}")
    return value


_INJECTED_CHARS: Final = 4_000


class BuiltInTargets:
    """Finds the built-in method that a call names; one instance per worker process."""

    def __init__(
        self,
        database: Database,
        registry: Registry,
        host: PluginHost,
        *,
        keep_awake: Iterable[str],
        redact: Callable[[str], str] = str,
    ) -> None:
        """Create the targets.

        Args:
            keep_awake: patterns of plugin keys that never sleep.
            redact: removes secrets and host paths from errors of plugins.
        """
        self._database = database
        self._registry = registry
        self._host = host
        self._keep_awake = tuple(keep_awake)
        self._redact = redact

    def find(self, invocation: Invocation) -> CallTarget:
        """Return the method that a call names.

        Raises:
            MethodNotFoundError: there is no such built-in method.
        """
        entry = built_in_entry(invocation.method, in_round=invocation.round_id is not None)
        if entry is None or invocation.method in WAIT_TASKS:  # no worker runs those
            raise MethodNotFoundError(f"there is no built-in method {invocation.method!r}")
        methods: dict[str, Callable[..., Awaitable[Any]]] = {
            "help_of": self._help_of,
            "search_tools": self._search_tools,
            "activate_plugin": self._activate_plugin,
            "extend_plugin_activation": self._extend_plugin_activation,
            "read_rest": self._read_rest,
        }
        return _BuiltIn(entry, methods[entry.name])

    async def _help_of(self, ctx: AgentCtx, _: Invocation, *names: str) -> str:
        return help_text(await plugins_of_chat(self._registry, ctx), names)

    async def _search_tools(
        self, ctx: AgentCtx, _: Invocation, words: str, limit: int = 10
    ) -> list[dict[str, str]]:
        return search(await plugins_of_chat(self._registry, ctx), words, limit)

    async def _activate_plugin(
        self, ctx: AgentCtx, invocation: Invocation, module_name: str, rounds: int = 5
    ) -> str:
        turns = _turns("activate_plugin", rounds)
        plugin, refusal = await self._sleeper(ctx, module_name)
        if plugin is None:
            return refusal
        left = await self._wake(invocation, plugin, turns, adds=False)
        texts = [f"Plugin {module_name} is awake {_for_turns(left)}. Its methods:", plugin_text(plugin)]
        injected = await self._injected(plugin, ctx)
        return "\n".join([*texts, "What it adds to prompts:", injected] if injected else texts)

    async def _extend_plugin_activation(
        self, ctx: AgentCtx, invocation: Invocation, module_name: str, rounds: int = 3
    ) -> str:
        turns = _turns("extend_plugin_activation", rounds)
        plugin, refusal = await self._sleeper(ctx, module_name)
        if plugin is None:
            return refusal
        left = await self._wake(invocation, plugin, turns, adds=True)
        return f"Plugin {module_name} stays awake {_for_turns(left)}."

    async def _read_rest(
        self, _: AgentCtx, invocation: Invocation, handle: str, start: int = 0, most: int = MOST_CHARS
    ) -> str:
        async with self._database.read() as transaction:
            return await rest_of(transaction, invocation.chat_key, handle, start=start, most=most)

    async def _wake(self, call: Invocation, plugin: ChatPlugin, turns: int, *, adds: bool) -> int | None:
        async with self._database.begin() as transaction:
            return await wake(
                transaction, call.chat_key, plugin.entry.key, turns=turns, turn_id=call.turn_id, adds=adds
            )

    async def _sleeper(self, ctx: AgentCtx, module_name: str) -> tuple[ChatPlugin | None, str]:
        """Return the plugin of that name that may sleep, or None and the reason."""
        if not isinstance(module_name, str):
            raise ArgumentError(f"module_name must be a text, not {type(module_name).__name__}")
        plugins = await plugins_of_chat(self._registry, ctx)
        named = [plugin for plugin in plugins if module_name in (plugin.entry.module_name, plugin.entry.key)]
        sleepers = [plugin for plugin in named if may_sleep(plugin.entry, keep_awake=self._keep_awake)]
        if sleepers:
            return sleepers[0], ""
        if named:
            return None, f"Plugin {module_name} is always awake."
        near = similar(module_name, (plugin.entry.module_name for plugin in plugins))
        hint = f"; similar names: {', '.join(near)}" if near else ""
        return None, f"This chat has no plugin {module_name[:80]!r}{hint}."

    async def _injected(self, plugin: ChatPlugin, ctx: AgentCtx) -> str:
        loaded = next((one for one in self._host.plugins if one.key == plugin.entry.key), None)
        if loaded is None or loaded.hook("prompt_inject") is None:
            return ""
        brief = PluginBrief(
            key=loaded.key,
            name=loaded.name,
            module_name=loaded.module_name,
            methods=(),
            inject=lambda: self._host.inject(loaded, ctx),
        )
        (injected,) = await collect_injected([brief], redact=self._redact)
        return injected.text[:_INJECTED_CHARS]


class _BuiltIn(CallTarget):
    """One built-in method."""

    def __init__(self, entry: MethodEntry, method: Callable[..., Awaitable[Any]]) -> None:
        self.subject = entry
        self.is_claimed = entry.is_claimed
        self._method = method

    async def run(self, invocation: Invocation, arguments: Arguments, on_step: OnStep) -> Outcome:
        args, kwargs = arguments
        ctx = context_of(
            invocation, user_id=invocation.user_id, call_id=invocation.call_id, round_id=invocation.round_id
        )
        try:
            inspect.signature(self._method).bind(ctx, invocation, *args, **kwargs)
        except TypeError as exc:
            raise ArgumentError(f"{self.subject.name}: {exc}") from None
        value = await self._method(ctx, invocation, *args, **kwargs)
        text = None if self.subject.type is SandboxMethodType.TOOL else str(value)
        return Outcome(
            type=self.subject.type, value=None if self.subject.type.wakes_agent else value, text=text
        )


def _turns(name: str, rounds: object) -> int:
    if isinstance(rounds, bool) or not isinstance(rounds, int) or not 1 <= rounds <= MOST_TURNS:
        raise ArgumentError(f"{name}: rounds={rounds!r} must be a number from 1 to {MOST_TURNS}")
    return rounds


def _for_turns(left: int | None) -> str:
    if left is None:
        return "until it is put to sleep"
    return "for 1 turn" if left == 1 else f"for {left} turns"
