"""Builds the input of a round from rows, pictures and plugins; number and size of pictures are bounded."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Final

from loguru import logger

from broker_config.model_groups import Vision, vision_of
from broker_config.settings import Settings
from nekro.agent.llm import LLMAnswer
from nekro.agent.model import ChatBrief, HistoryImage, HistoryMessage, PluginBrief
from nekro.agent.multimodal import picture_part
from nekro.agent.rounds import RoundInput
from nekro.app.calls.dispatch import CallRecord, CallScope, Dispatcher
from nekro.app.chats.writer import context_of
from nekro.app.leases import HeldLease
from nekro.app.rounds.sleeping_plugins import awake_plugins, brief_of, may_sleep
from nekro.plugins.entries import MethodEntry
from nekro.plugins.entry_registry import Registry
from nekro.plugins.hooks import PluginHost
from nekro.sandbox.models import KeptVariables
from nekro_agent.errors import InvalidValueError
from nekro_agent.files import safe_files
from nekro_agent.ports import ChatInfo
from nekro_agent.schemas.agent_ctx import AgentCtx
from storage.accounts.spendings import PayingKey
from storage.engine import Database
from storage.files import DataAreas
from storage.repositories.rounds import ClaimedRound, RoundReport
from workers.calls.method_help import method_brief, names_of
from workers.rounds.attempt_events import AttemptEvents
from workers.rounds.chat_view import ChatView

__all__ = [
    "PictureLoader",
    "PreparedRound",
    "RoundInputs",
]


class PictureLoader:
    """Reads pictures from the uploads of chats; a prompt's builder decodes them."""

    def __init__(self, settings: Settings, areas: DataAreas) -> None:
        self._settings = settings
        self._most = settings.agent.history_images
        self._file_bytes = settings.agent.image_file_bytes
        self._areas = areas

    def vision(self, group: str | None) -> Vision:
        """Return how the models of a chat's group see; None means ``default``."""
        return vision_of(self._settings, group)

    async def load(
        self, chat_key: str, messages: Sequence[HistoryMessage], *, sees: bool
    ) -> Sequence[HistoryMessage]:
        """Return the messages, the newest of their pictures with their content, the others with a reason.

        Args:
            sees: whether a model of the chat sees images; else no file is read.
        """
        if not any(message.images for message in messages):
            return messages
        if not sees:
            return [_hidden(message, "this model sees no images") for message in messages]
        return await asyncio.to_thread(self._load, chat_key, messages)

    def _load(self, chat_key: str, messages: Sequence[HistoryMessage]) -> list[HistoryMessage]:
        uploads = self._areas.uploads_dir(chat_key)
        left = self._most
        loaded: list[HistoryMessage] = []
        for message in reversed(messages):
            images = list(_hidden(message, f"only the newest {self._most} are").images)
            for index in range(len(images) - 1, max(len(images) - left, 0) - 1, -1):
                images[index] = self._read(uploads, message.images[index])
            left -= min(left, len(images))
            loaded.append(dataclasses.replace(message, images=tuple(images)) if images else message)
        return loaded[::-1]

    def _read(self, uploads: Path, image: HistoryImage) -> HistoryImage:
        """Return a picture with its content or the reason why not: a bad one must not fail the round."""
        name = PurePosixPath(image.path).name
        try:
            content = safe_files.read_file(uploads, name, max_bytes=self._file_bytes)
        except FileNotFoundError:
            return dataclasses.replace(image, hidden="the file no longer exists")
        except (InvalidValueError, OSError) as exc:
            logger.bind(error=str(exc)).warning("picture_not_shown")
            reason = f"the file cannot be read, or is larger than {self._file_bytes} bytes"
            return dataclasses.replace(image, hidden=reason)
        return dataclasses.replace(image, part=picture_part(content))


def _hidden(message: HistoryMessage, reason: str) -> HistoryMessage:
    images = tuple(dataclasses.replace(image, hidden=reason) for image in message.images)
    return dataclasses.replace(message, images=images) if images else message


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
        on_answer: Callable[[RoundReport, LLMAnswer], Awaitable[None]],
        events: AttemptEvents,
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
            misfit=calls.misfit,
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
        by_plugin: dict[str, list[MethodEntry]] = {}
        for entry in entries:
            by_plugin.setdefault(entry.plugin_key, []).append(entry)
        for plugin in self._host.plugins:
            own = by_plugin.get(plugin.key, [])
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
