"""Builds the input of a round from rows, pictures and plugins; number and size of pictures are bounded."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import PurePosixPath
from typing import Final

from loguru import logger

from broker_config.model_groups import Vision, vision_of
from broker_config.settings import Settings
from nekro.agent.llm import LLMAnswer
from nekro.agent.model import ChatBrief, HistoryImage, HistoryMessage, PluginBrief
from nekro.agent.multimodal import picture_part
from nekro.agent.rounds import Resumption, RoundInput
from nekro.app.calls.dispatch import CallScope, Dispatcher
from nekro.app.calls.journal import ProgramJournal, read_journal
from nekro.app.calls.run_calls import Program, RunCalls
from nekro.app.chats.files import ChatFiles
from nekro.app.chats.writer import context_of
from nekro.app.leases import HeldLease
from nekro.app.rounds.sleeping_plugins import awake_plugins, brief_of, may_sleep
from nekro.app.rounds.turn_ends import copied_fates, fates_of
from nekro.plugins.entries import MethodEntry
from nekro.plugins.entry_registry import Registry
from nekro.plugins.hooks import PluginHost
from nekro.sandbox.models import KeptVariables
from nekro_agent import layout
from nekro_agent.errors import NekroError, NotFoundError
from nekro_agent.ports import ChatInfo
from nekro_agent.schemas.agent_ctx import AgentCtx
from storage.accounts.spendings import PayingKey
from storage.engine import Database
from storage.repositories.parked_programs import ParkedProgram
from storage.repositories.rounds import ClaimedRound, Round, RoundReport
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

    def __init__(self, settings: Settings, files_of: Callable[[ChatInfo], ChatFiles]) -> None:
        self._settings = settings
        self._most = settings.agent.history_images
        self._file_bytes = settings.agent.image_file_bytes
        self._files_of = files_of

    def vision(self, group: str | None) -> Vision:
        """Return how the models of a chat's group see; None means ``default``."""
        return vision_of(self._settings, group)

    async def load(
        self, chat: ChatInfo, messages: Sequence[HistoryMessage], *, sees: bool
    ) -> Sequence[HistoryMessage]:
        """Return the messages, the newest of their pictures with their content, the others with a reason.

        Args:
            sees: whether a model of the chat sees images; else no file is read.
        """
        if not any(message.images for message in messages):
            return messages
        if not sees:
            return [_hidden(message, "this model sees no images") for message in messages]
        return await asyncio.to_thread(self._load, chat, messages)

    def _load(self, chat: ChatInfo, messages: Sequence[HistoryMessage]) -> list[HistoryMessage]:
        files = self._files_of(chat)
        left = self._most
        loaded: list[HistoryMessage] = []
        for message in reversed(messages):
            images = list(_hidden(message, f"only the newest {self._most} are").images)
            for index in range(len(images) - 1, max(len(images) - left, 0) - 1, -1):
                images[index] = self._read(files, message.images[index])
            left -= min(left, len(images))
            loaded.append(dataclasses.replace(message, images=tuple(images)) if images else message)
        return loaded[::-1]

    def _read(self, files: ChatFiles, image: HistoryImage) -> HistoryImage:
        """Return a picture with its content or the reason why not: a bad one must not fail the round."""
        path = f"{layout.SANDBOX_UPLOADS}/{PurePosixPath(image.path).name}"
        try:
            with files.open(path, most_bytes=self._file_bytes) as opened:
                content = opened.file.read(self._file_bytes)
        except NotFoundError:
            return dataclasses.replace(image, hidden="the file no longer exists")
        except (NekroError, OSError) as exc:
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
    """A round that is ready to run."""

    input: RoundInput
    chat: ChatInfo
    #: Pays for it; None: no key does.
    key: PayingKey | None
    #: As in ``RoundPast``.
    waking_method: str | None
    #: Dispatches its calls, and has their records.
    run: RunCalls
    #: The round whose answer its program is.
    program_id: str

    async def to_park(self) -> ParkedProgram | None:
        """Return what the program waits for, and needs then; None if it does not wait.

        Raises:
            BrokerUnavailableError: the results of its calls cannot be read.
        """
        parked = self.without_results()
        if parked is None:
            return None
        answers, notes = await self.run.to_park()
        return dataclasses.replace(parked, answers=answers, notes=notes)

    def without_results(self) -> ParkedProgram | None:
        """Return the same without the results of its calls, which stay where they are."""
        call_id, variables = self.run.parks_at, self.input.variables
        if call_id is None:
            return None
        return ParkedProgram(
            call_id=call_id,
            kept=None if variables is None else dict(variables.values),
            not_kept=None if variables is None else list(variables.not_kept),
        )


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
        journal_bytes: int = 0,
        parks: bool = False,
        prefetch: Callable[[str, str], object] = lambda chat_key, container_key: None,
    ) -> None:
        """Create it.

        Args:
            prefetch: brings the files of a chat and a sandbox in the background while the model answers.
            keep_awake: patterns of plugin keys that never sleep.
            journal_bytes: as in ``Program``; 0: programs are not run again.
            parks: as in ``Program``.
            keeps_variables: whether programs begin with the variables of those before them.
        """
        self._database = database
        self._registry = registry
        self._dispatcher = dispatcher
        self._host = host
        self._pictures = pictures
        self._keep_awake = keep_awake
        self._keeps_variables = keeps_variables
        self._journal_bytes = journal_bytes
        self._parks = parks
        self._prefetch = prefetch

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
        self._prefetch(chat.chat_key, chat.container_key)
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
        program_id = round_.program_id or round_.id
        journal = await self._journal(round_, events)
        code = round_.code if round_.program_id is None else await self._begin_again(round_, lease.fence)
        program = Program(
            run_id=program_id,
            parks=self._parks,
            is_resumable=self._journal_bytes > 0 and not round_.not_resumable,
            journal=journal,
            journal_bytes=self._journal_bytes,
            on_unresumable=partial(self._keep_unresumable, round_.id, lease.fence),
        )
        # A sandbox keeps running while its worker is suspended.
        calls = RunCalls(
            self._dispatcher, scope, entries, program=program, observer=events, before_call=lease.ensure
        )
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
            history=(
                ()
                if journal is not None
                else await self._pictures.load(chat, past.messages, sees=vision.sees)
            ),
            plugins=self._plugin_briefs(entries, ctx, awake),
            methods=calls.stubs,
            dispatch=calls.dispatch,
            seed=calls.seed,
            check_seed=self._dispatcher.secrets.check_word(program_id),
            call_id=calls.id_of,
            program_id=program_id if program.is_resumable else None,
            resumes=None if journal is None else _resumption(code or "", journal),
            misfit=calls.misfit,
            previous=turn.previous,
            observations=turn.loose,
            variables=await self._variables(round_),
            fence=lease.fence,
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
            run=calls,
            program_id=program_id,
        )

    async def _journal(self, round_: Round, events: AttemptEvents) -> ProgramJournal | None:
        """Return what the program of an earlier attempt did; None if the model is to be asked."""
        if not round_.resumes:
            return None
        journal = await read_journal(
            self._database,
            self._dispatcher.marks,
            chat_key=round_.chat_key,
            program_id=round_.program_id or round_.id,
        )
        if round_.attempt > 1 or round_.program_id is not None:
            await events.resume(lambda: journal.is_repeating)
        # Else it repeats a program of another chat, of which nothing was shown in this one.
        return journal

    async def _begin_again(self, round_: Round, fence: int) -> str | None:
        """Return the code of a round that goes on with the program of an earlier one, and record it."""
        if round_.answered_at is not None:
            return round_.code
        async with self._database.begin() as transaction:
            begun = await transaction.rounds.get(round_.program_id or "")
            report = RoundReport(
                answer=begun.answer, code=begun.code, model=begun.model, not_resumable=begun.not_resumable
            )
            await transaction.rounds.record(round_.id, fence=fence, report=report)
        return begun.code

    async def _keep_unresumable(self, round_id: str, fence: int, reason: str) -> None:
        async with self._database.begin() as transaction:
            await transaction.rounds.record(round_id, fence=fence, report=RoundReport(not_resumable=reason))

    async def _awake(self, chat_key: str, *, first_round: int) -> Mapping[str, int | None]:
        """Return the plugins that were woken, as ``awake_plugins``; reads nothing if none may sleep."""
        if not any(may_sleep(plugin, keep_awake=self._keep_awake) for plugin in self._host.plugins):
            return {}
        async with self._database.read() as transaction:
            return await awake_plugins(transaction, chat_key, first_round=first_round)

    async def _variables(self, round_: Round) -> KeptVariables | None:
        if not self._keeps_variables:
            return None
        async with self._database.read() as transaction:
            if round_.program_id is not None:
                last = (await transaction.parked_programs.of_program(round_.program_id))[-1]
                kept, not_kept = last.kept, last.not_kept
            else:
                found = await transaction.variables.find(round_.turn_id)
                kept, not_kept = (None, None) if found is None else (found.kept, found.not_kept)
        return None if kept is None else KeptVariables(values=kept, not_kept=tuple(not_kept or ()))

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


def _resumption(code: str, journal: ProgramJournal) -> Resumption:
    def divergence() -> str | None:
        return f"{fates_of(journal.rows)}{copied_fates(journal.copied)}" if journal.has_unread else None

    return Resumption(code=code, readings=journal.readings, divergence=divergence)


def _chat_brief(chat: ChatInfo) -> ChatBrief:
    return ChatBrief(
        chat_key=chat.chat_key,
        container_key=chat.container_key,
        adapter_key=chat.adapter_key,
        channel_name=chat.channel_name,
        channel_type=chat.channel_type,
    )
