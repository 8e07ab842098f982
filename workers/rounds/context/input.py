"""Builds the input of a round from rows and from the plugins."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from nekro.agent.model import ChatBrief, PluginBrief
from nekro.agent.rounds import RoundAnswer, RoundInput
from nekro.app.calls.dispatch import CallRecord, CallScope, Dispatcher
from nekro.app.chats.contexts import context_of
from nekro.app.leases.keeper import HeldLease
from nekro.app.listing.chat_plugins import method_brief, names_of
from nekro.app.listing.sleep import awake_plugins, brief_of, may_sleep
from nekro.app.rounds.events import RoundEvents
from nekro.plugins.entries import MethodEntry
from nekro.plugins.entry_registry import Registry
from nekro.sandbox.models import KeptVariables
from nekro_agent.execution.hooks import PluginHost
from nekro_agent.ports import ChatInfo
from nekro_agent.schemas.agent_ctx import AgentCtx
from storage.access.spendings import PayingKey
from storage.engine import Database
from storage.repositories.rounds import ClaimedRound
from workers.rounds.context.chat_view import ChatView
from workers.rounds.context.pictures import PictureLoader

__all__ = ["PreparedRound", "RoundInputs"]

#: Rounds of a chat before its turn in which a method counts as used lately.
_RECENT_ROUNDS: Final = 20


@dataclass(frozen=True, kw_only=True)
class PreparedRound:
    """A round that is ready to run; ``calls`` grows while it runs."""

    input: RoundInput
    chat: ChatInfo
    #: Pays for it; None: no key does.
    key: PayingKey | None
    #: As in ``RoundPast``.
    waking_method: str | None
    calls: Sequence[CallRecord]


class RoundInputs:
    """Builds the inputs of rounds; one instance per rounds worker."""

    def __init__(
        self,
        database: Database,
        registry: Registry,
        dispatcher: Dispatcher,
        host: PluginHost,
        pictures: PictureLoader,
        *,
        keep_awake: Sequence[str] = (),
        keeps_variables: bool = False,
    ) -> None:
        """Create it.

        Args:
            keep_awake: patterns of plugin keys that never sleep.
            keeps_variables: whether programs begin with the variables of those before them.
        """
        self._database = database
        self._registry = registry
        self._dispatcher = dispatcher
        self._host = host
        self._pictures = pictures
        self._keep_awake = keep_awake
        self._keeps_variables = keeps_variables

    async def build(
        self,
        claimed: ClaimedRound,
        lease: HeldLease,
        view: ChatView,
        *,
        may_wake: bool,
        on_answer: Callable[[RoundAnswer], Awaitable[None]],
        events: RoundEvents,
    ) -> PreparedRound:
        """Collect everything for one round.

        Args:
            may_wake: whether an AGENT result of this round may request another one; False in
                the last round of a turn.
            on_answer: as in ``RoundInput``.
            events: receives what happens in the round.
        """
        round_, user_id = claimed.round, claimed.user_id
        past = await view.read(self._database, claimed)
        chat, turn = past.chat, past.turn
        ctx = context_of(chat, user_id=user_id)
        entries = await self._registry.available(ctx)
        awake = await self._awake(chat.chat_key, first_round=turn.first_sequence)
        scope = CallScope(
            chat=chat,
            user_id=user_id,
            round_id=round_.id,
            turn_id=round_.turn_id,
            round_number=round_.number,
            wakes_agent=may_wake,
        )
        await self._dispatcher.refresh()
        # A sandbox keeps running while its worker is suspended.
        calls = self._dispatcher.for_run(scope, entries, observer=events, before_call=lease.ensure)
        vision = self._pictures.vision(chat.model_group)
        round_input = RoundInput(
            round_id=round_.id,
            chat=_chat_brief(chat),
            persona=past.persona,
            model_group=chat.model_group,
            number=round_.number,
            turn_started_at=turn.started_at,
            vision=vision,
            summary=past.summary,
            history=await self._pictures.load(chat.chat_key, past.messages, sees=vision.sees),
            plugins=self._plugin_briefs(entries, ctx, awake),
            methods=calls.stubs,
            dispatch=calls.dispatch,
            previous=turn.previous,
            observations=turn.loose,
            variables=await self._variables(round_.turn_id),
            recent=partial(self._recent, chat.chat_key, entries, first_round=turn.first_sequence),
            on_request=events.model_requested,
            on_delta=events.model_delta,
            on_words=events.words,
            on_answer=on_answer,
            on_output=events.output,
        )
        return PreparedRound(
            input=round_input,
            chat=chat,
            key=past.key,
            waking_method=past.waking_method,
            calls=calls.records,
        )

    async def _awake(self, chat_key: str, *, first_round: int) -> Mapping[str, int | None]:
        """Return the plugins that were woken, as ``awake_plugins``; reads nothing if none may sleep."""
        if not any(may_sleep(plugin, keep_awake=self._keep_awake) for plugin in self._host.plugins):
            return {}
        async with self._database.read() as transaction:
            return await awake_plugins(transaction, chat_key, first_round=first_round)

    async def _variables(self, turn_id: str) -> KeptVariables | None:
        if not self._keeps_variables:
            return None
        async with self._database.read() as transaction:
            found = await transaction.variables.find(turn_id)
        return None if found is None else KeptVariables(values=found.kept, not_kept=tuple(found.not_kept))

    async def _recent(self, chat_key: str, entries: Sequence[MethodEntry], *, first_round: int) -> list[str]:
        """Return the names of the methods that the chat used before a turn, the last used first."""
        async with self._database.read() as transaction:
            rounds = await transaction.activations.recent_calls(
                chat_key, before=first_round, limit=_RECENT_ROUNDS
            )
        names = names_of(self._registry, entries)
        used = [call["method"] for calls in rounds for call in reversed(calls)]
        return list(dict.fromkeys(names[method] for method in used if method in names))

    def _plugin_briefs(
        self, entries: Sequence[MethodEntry], ctx: AgentCtx, awake: Mapping[str, int | None]
    ) -> list[PluginBrief]:
        briefs = []
        for plugin in self._host.plugins:
            own = [entry for entry in entries if entry.plugin_key == plugin.key]
            inject = partial(self._host.inject, plugin, ctx) if plugin.hook("prompt_inject") else None
            if not plugin.is_enabled or not plugin.serves(ctx.adapter_key) or not (own or inject):
                continue
            # Only methods can be asked for, so a plugin without any cannot be woken.
            sleeps = bool(own) and may_sleep(plugin, keep_awake=self._keep_awake)
            is_asleep = sleeps and plugin.key not in awake
            briefs.append(
                PluginBrief(
                    key=plugin.key,
                    name=plugin.name,
                    module_name=plugin.module_name,
                    methods=[method_brief(self._registry, entry) for entry in own],
                    inject=None if is_asleep else inject,
                    always_awake=not sleeps,
                    asleep=brief_of(plugin) if is_asleep else None,
                    turns_left=awake.get(plugin.key) if sleeps else None,
                )
            )
        return briefs


def _chat_brief(chat: ChatInfo) -> ChatBrief:
    return ChatBrief(
        chat_key=chat.chat_key,
        container_key=chat.container_key,
        adapter_key=chat.adapter_key,
        channel_name=chat.channel_name,
        channel_type=chat.channel_type,
    )
