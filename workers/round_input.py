"""What a round starts from, gathered from rows and from the plugins."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from datetime import datetime
from functools import partial

from agent.model import ChatBrief, HistoryMessage, MethodBrief, Observation, PluginBrief, TurnRound
from agent.rounds import RoundInput
from broker_config.settings import AgentSettings
from nekro_agent.invoke import run_callable
from nekro_agent.plugin import NekroPlugin
from nekro_agent.ports import ChatInfo
from nekro_agent.schemas.agent_ctx import AgentCtx
from sandbox.models import StopType
from storage.calls import CallRepository
from storage.chats import ChatRepository
from storage.engine import Database
from storage.messages import Message, MessageRepository
from storage.rounds import ClaimedRound, Round, RoundRepository
from storage.states import RoundState, TriggerKind
from storage.transaction import Transaction
from workers.dispatch import CallScope, Dispatcher
from workers.registry import MethodEntry, Registry
from workers.runs import context_of

__all__ = ["RoundInputs"]


class RoundInputs:
    """Builds the inputs of rounds; one instance per rounds worker."""

    def __init__(
        self, database: Database, registry: Registry, dispatcher: Dispatcher, settings: AgentSettings
    ) -> None:
        self._database = database
        self._registry = registry
        self._dispatcher = dispatcher
        self._settings = settings

    async def build(self, claimed: ClaimedRound, *, may_wake: bool) -> RoundInput:
        """Gather everything for one round.

        Args:
            may_wake: whether an AGENT result of this round may schedule another one; False in
                the last round of a turn.
        """
        round_ = claimed.round
        async with self._database.read() as transaction:
            chat = await ChatRepository(transaction.connection).get(round_.chat_key)
            messages = await MessageRepository(transaction.connection).newest(
                round_.chat_key, limit=self._settings.history_messages
            )
            turn = await _Turn.read(transaction, claimed)
        ctx = context_of(chat, user_id=round_.user_id)
        entries = await self._registry.available(ctx)
        scope = CallScope(
            chat=chat,
            user_id=round_.user_id,
            round_id=round_.id,
            turn_id=round_.turn_id,
            round_number=round_.number,
            wakes_agent=may_wake,
        )
        calls = self._dispatcher.for_run(scope, entries)
        return RoundInput(
            round_id=round_.id,
            chat=_chat_brief(chat),
            number=round_.number,
            turn_started_at=turn.started_at,
            history=[_history_message(message) for message in messages],
            plugins=self._plugin_briefs(entries, ctx),
            methods=calls.stubs,
            dispatch=calls.dispatch,
            previous=turn.previous,
            observations=turn.loose,
        )

    def _plugin_briefs(self, entries: Sequence[MethodEntry], ctx: AgentCtx) -> list[PluginBrief]:
        briefs = []
        for plugin in self._registry.plugins:
            own = [entry for entry in entries if entry.plugin is plugin]
            inject = _inject_of(plugin, ctx)
            if not plugin.is_enabled or not (own or inject):
                continue
            briefs.append(
                PluginBrief(
                    key=plugin.key,
                    name=plugin.name,
                    module_name=plugin.module_name,
                    methods=[self._method_brief(entry) for entry in own],
                    inject=inject,
                    adapters=frozenset(plugin.support_adapter),
                )
            )
        return briefs

    def _method_brief(self, entry: MethodEntry) -> MethodBrief:
        # A method that lost its bare name is called by its full one.
        name = entry.name if entry.name in self._registry.bare_names(entry) else entry.task
        return MethodBrief(name=name, signature=entry.signature, doc=entry.doc, type=entry.type)


class _Turn:
    """The earlier rounds of a turn, with the results that their calls left."""

    def __init__(self, *, started_at: datetime, previous: list[TurnRound], loose: list[Observation]) -> None:
        self.started_at = started_at
        self.previous = previous
        self.loose = loose

    @classmethod
    async def read(cls, transaction: Transaction, claimed: ClaimedRound) -> _Turn:
        rounds = RoundRepository(transaction.connection)
        of_turn = await rounds.rounds_of_turn(claimed.round.turn_id)
        earlier = [
            item
            for item in of_turn
            if item.state is RoundState.DONE and item.sequence < claimed.round.sequence
        ]
        triggers = list(claimed.triggers)
        for item in earlier:
            triggers += [item, *await rounds.merged_into(item.id)]
        by_round: dict[str | None, list[Observation]] = {}
        for trigger in sorted(triggers, key=lambda item: item.sequence):
            if trigger.trigger_kind is TriggerKind.CALL:
                caller, observation = await _observation(transaction, trigger)
                by_round.setdefault(caller, []).append(observation)
        previous = [_turn_round(item, by_round.pop(item.id, [])) for item in earlier]
        first = min((*of_turn, claimed.round), key=lambda item: item.sequence)
        loose = [observation for observations in by_round.values() for observation in observations]
        return cls(started_at=first.started_at or first.requested_at, previous=previous, loose=loose)


async def _observation(transaction: Transaction, trigger: Round) -> tuple[str | None, Observation]:
    """Return the round whose code made the call, and what the call left."""
    call = await CallRepository(transaction.connection).get(trigger.trigger_id)
    observation = Observation(
        method=call.method.rpartition(".")[2],
        type=call.type,
        text=trigger.observation or "",
        segments=trigger.segments,
        call_id=call.id,
    )
    return call.round_id, observation


def _turn_round(item: Round, observations: Sequence[Observation]) -> TurnRound:
    return TurnRound(
        number=item.number,
        asked_at=item.started_at or item.requested_at,
        answer=item.answer or "",
        stop_type=StopType(item.stop_type if item.stop_type is not None else StopType.NORMAL),
        reason=item.error or "",
        output=item.output or "",
        observations=tuple(observations),
    )


def _chat_brief(chat: ChatInfo) -> ChatBrief:
    return ChatBrief(
        chat_key=chat.chat_key,
        container_key=chat.container_key,
        adapter_key=chat.adapter_key,
        channel_name=chat.channel_name,
        channel_type=chat.channel_type,
    )


def _history_message(message: Message) -> HistoryMessage:
    data = message.data or {}
    path = data.get("file_path")
    return HistoryMessage(
        message_id=message.id,
        kind=message.kind,
        text=message.text,
        sent_at=message.created_at,
        sender_name=message.sender_name or "",
        sender_id=message.sender_id or "",
        attachments=(str(path),) if path else (),
        observation_of=_observed_call(message),
    )


def _observed_call(message: Message) -> str | None:
    """Id of the call whose result the message is; not of the call that merely sent it."""
    kind, _, call_id = (message.once_key or "").partition(":")
    return call_id if kind == "observation" else None


def _inject_of(plugin: NekroPlugin, ctx: AgentCtx) -> Callable[[], Awaitable[str]] | None:
    inject = plugin.hook("prompt_inject")
    if inject is None:
        return None
    return partial(run_callable, inject, ctx.for_plugin(plugin.key))
