"""Builds the input of a round from rows and from the plugins."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from agent.model import ChatBrief, MethodBrief, PluginBrief
from agent.rounds import RoundAnswer, RoundInput
from nekro_agent.execution.hooks import PluginHost
from nekro_agent.ports import ChatInfo
from nekro_agent.schemas.agent_ctx import AgentCtx
from sandbox.models import Dispatch, StubCall, StubResult
from storage.engine import Database
from storage.repositories.rounds import ClaimedRound
from workers.calls.dispatch import CallRecord, CallScope, Dispatcher
from workers.catalogue.entries import MethodEntry
from workers.catalogue.registry import Registry
from workers.leases.keeper import HeldLease
from workers.rounds.chat_view import ChatView
from workers.rounds.events import RoundEvents
from workers.rounds.pictures import PictureLoader
from workers.rounds.runs import context_of

__all__ = ["PreparedRound", "RoundInputs"]

_MUST_BE_APPROVED: Final = (
    "A person must approve each call. Unless one did before, your program ends at the call, and you see the "
    "result after the decision."
)


@dataclass(frozen=True, kw_only=True)
class PreparedRound:
    """A round that is ready to run; ``calls`` grows while it runs."""

    input: RoundInput
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
    ) -> None:
        self._database = database
        self._registry = registry
        self._dispatcher = dispatcher
        self._host = host
        self._pictures = pictures

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
        scope = CallScope(
            chat=chat,
            user_id=user_id,
            round_id=round_.id,
            turn_id=round_.turn_id,
            round_number=round_.number,
            wakes_agent=may_wake,
        )
        await self._dispatcher.refresh()
        calls = self._dispatcher.for_run(scope, entries, observer=events)
        round_input = RoundInput(
            round_id=round_.id,
            chat=_chat_brief(chat),
            persona=past.persona,
            number=round_.number,
            turn_started_at=turn.started_at,
            history=await self._pictures.load(chat.chat_key, past.messages),
            plugins=self._plugin_briefs(entries, ctx),
            methods=calls.stubs,
            dispatch=_guarded(calls.dispatch, lease),
            previous=turn.previous,
            observations=turn.loose,
            on_request=events.model_requested,
            on_delta=events.model_delta,
            on_answer=on_answer,
            on_output=events.output,
        )
        return PreparedRound(input=round_input, calls=calls.records)

    def _plugin_briefs(self, entries: Sequence[MethodEntry], ctx: AgentCtx) -> list[PluginBrief]:
        briefs = []
        for plugin in self._host.plugins:
            own = [entry for entry in entries if entry.plugin_key == plugin.key]
            inject = partial(self._host.inject, plugin, ctx) if plugin.hook("prompt_inject") else None
            if not plugin.is_enabled or not plugin.serves(ctx.adapter_key) or not (own or inject):
                continue
            briefs.append(
                PluginBrief(
                    key=plugin.key,
                    name=plugin.name,
                    module_name=plugin.module_name,
                    methods=[self._method_brief(entry) for entry in own],
                    inject=inject,
                )
            )
        return briefs

    def _method_brief(self, entry: MethodEntry) -> MethodBrief:
        # A method without a bare name is called by its full name.
        name = entry.name if entry.name in self._registry.bare_names(entry) else entry.task
        doc = entry.doc
        if doc is not None and entry.requires_approval:
            doc = f"{doc}\n\n{_MUST_BE_APPROVED}"
        return MethodBrief(name=name, signature=entry.signature, doc=doc, type=entry.type)


def _guarded(dispatch: Dispatch, lease: HeldLease) -> Dispatch:
    """Check the lease before each call: a sandbox keeps running while its worker is suspended."""

    async def guarded(call: StubCall) -> StubResult:
        await lease.ensure()
        return await dispatch(call)

    return guarded


def _chat_brief(chat: ChatInfo) -> ChatBrief:
    return ChatBrief(
        chat_key=chat.chat_key,
        container_key=chat.container_key,
        adapter_key=chat.adapter_key,
        channel_name=chat.channel_name,
        channel_type=chat.channel_type,
    )
