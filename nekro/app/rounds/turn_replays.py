"""Turns again: their programs with the recorded answers, or another model with their recorded prompts.

Neither makes an effect. Another model is asked for each round by itself, with the prompt that the round had
(``NEKRO_AGENT__KEEP_PROMPTS``): a prompt cannot be built again later, because plugins add to it, and messages
have come since. Its program begins with the variables of the recorded program before it, and its calls are
answered by the recording where the recorded program made the same ones. The requests are on the budgets of
the chat.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from broker_config.model_groups import chat_groups
from broker_config.settings import AnswerMode, Settings
from nekro.agent.answers.replies import Reply, ReplyKind, read_program, read_reply
from nekro.agent.llm import LLMAnswer, LLMClient, LLMRequest
from nekro.agent.llm.clients import create_models
from nekro.agent.model import ImagePart, Part, PromptMessage, PromptRole, TextPart
from nekro.agent.room import tokens_of_prompt
from nekro.agent.text import check_word_of, restore_check_word
from nekro.agent.verdict import judge_reply
from nekro.app.calls.journal import CallIds
from nekro.app.catalogue import built_in_entries
from nekro.app.model_meters import ask_admitted, chat_entry
from nekro.app.rounds.cases import case_of, write_case
from nekro.app.rounds.recordings import RecordedTurn, read_turn
from nekro.app.rounds.replays import (
    Difference,
    ProgramReplay,
    Recording,
    Replayer,
    stubs_of,
    text_difference,
)
from nekro.app.spending import Spending
from nekro.plugins.entries import MethodEntry
from nekro.plugins.entry_registry import Registry
from nekro.sandbox.models import KeptVariables, StubMethod
from nekro.wire.seals import ProgramSecrets
from nekro_agent.errors import NotFoundError, UsageError
from storage.engine import Database
from storage.repositories.rounds import Round

__all__ = ["AskedRound", "ModelReplay", "TurnReplay", "TurnReplayer"]

_MOST_REASON_CHARS: Final = 300


@dataclass(frozen=True, kw_only=True)
class TurnReplay:
    """The replays of the programs of a turn, in order."""

    turn: RecordedTurn
    programs: list[ProgramReplay]

    @property
    def is_same(self) -> bool:
        """Whether nothing differs."""
        return not any(program.differences for program in self.programs)


@dataclass(frozen=True, kw_only=True)
class AskedRound:
    """What another model answered to the prompt of a round, and what came of it."""

    number: int
    answer: LLMAnswer
    #: Characters of the round's prompt, None if they are not known, and of what was kept of it and sent.
    prompt_chars: int | None
    sent_chars: int
    #: The program before and now; None: the answer had none to run.
    code_before: str | None
    code: str | None
    #: The message to the chat; None: the answer was none.
    words: str | None
    #: How the program ran; None: there was none to run.
    program: ProgramReplay | None = None
    #: What it would do otherwise; another program with the same calls, end and output is no difference.
    differences: list[Difference] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class ModelReplay:
    """The answers of a model group to the prompts of a turn, in order."""

    turn_id: str
    chat_key: str
    group: str
    rounds: list[AskedRound]
    #: Numbers of rounds whose prompts were not kept.
    not_kept: list[int]

    @property
    def is_same(self) -> bool:
        """Whether the model would do the same in each round."""
        return not any(one.differences for one in self.rounds)


class TurnReplayer:
    """Replays turns; one instance per command."""

    def __init__(
        self,
        database: Database,
        programs: Replayer,
        secrets: ProgramSecrets,
        settings: Settings,
        *,
        hash_seed: int,
        redact: Callable[[str], str],
        spending: Callable[[], Spending],
        registry: Callable[[], Awaitable[Registry]],
    ) -> None:
        """Create it.

        Args:
            hash_seed: that of the sandboxes of ``programs``.
            redact: removes secrets and host paths from texts of cases.
            spending, registry: what only another model needs: what it spends, and the methods of the fleet.
        """
        self._database = database
        self._programs = programs
        self._secrets = secrets
        self._settings = settings
        self._hash_seed = hash_seed
        self._redact = redact
        self._spending = spending
        self._registry = registry

    async def replay(self, turn_id: str) -> TurnReplay:
        """Run the programs of a turn again.

        Raises:
            NotFoundError: there is no such turn.
            SandboxError: a program could not be run.
            StorageUnavailableError: the database does not answer.
        """
        turn = await read_turn(self._database, self._secrets, turn_id)
        return TurnReplay(turn=turn, programs=await self._programs.replay(turn.recordings))

    async def save(self, replay: TurnReplay, path: Path) -> None:
        """Write a replay that is the same as a regression case, which is run once before.

        Raises:
            UsageError: the turn has no program, the replay or that of the case differs, or the file cannot be
                written.
            SandboxError: a program could not be run.
        """
        turn = replay.turn
        if not replay.programs:
            raise UsageError(f"turn {turn.turn_id} has no program, so there is no case to save")
        if not replay.is_same:
            raise UsageError(f"turn {turn.turn_id} is not saved: its programs differ from what is recorded")
        case = case_of(
            turn.recordings,
            replay.programs,
            hash_seed=self._hash_seed,
            keeps_variables=self._settings.sandbox.keep_variables,
            redact=self._redact,
        )
        again = await self._programs.replay(case.recordings())
        differences = [one for program in again for one in program.differences]
        if differences:
            raise UsageError(
                f"turn {turn.turn_id} is not saved: its case differs when it is run. A case has no secret "
                f"of the settings and no path of the host, which it may need. {differences[0].text}"
            )
        await asyncio.to_thread(write_case, case, path)

    async def ask(self, turn_id: str, group: str) -> ModelReplay:
        """Ask a model group what the turn asked its own, and compare what it would have done.

        Raises:
            NotFoundError: there is no such turn, or none of its prompts was kept.
            ModelGroupError: there is no such group, or it does not answer chats.
            BudgetExceededError: a budget of the chat is used up.
            LLMError: the model gave no answer, or none is configured.
            SandboxError: a program could not be run.
            StorageUnavailableError: the database does not answer.
        """
        name = chat_groups(self._settings, group)[0].name
        turn = await read_turn(self._database, self._secrets, turn_id)
        asked = [item for item in turn.rounds if item.answer is not None and item.program_id is None]
        async with self._database.read() as transaction:
            prompts = await transaction.prompts.of_rounds([item.id for item in asked])
        if not prompts:
            raise NotFoundError(
                f"no prompt of turn {turn_id} was kept, so no other model can be asked; with "
                "NEKRO_AGENT__KEEP_PROMPTS=true those of later turns are"
            )
        client = create_models(self._settings)
        try:
            rounds = await self._ask_each(turn, prompts, client, name)
        finally:
            await client.close()
        return ModelReplay(
            turn_id=turn_id,
            chat_key=turn.chat_key,
            group=name,
            rounds=rounds,
            not_kept=[item.number for item in asked if item.id not in prompts],
        )

    async def _ask_each(
        self,
        turn: RecordedTurn,
        prompts: Mapping[str, Sequence[Mapping[str, Any]]],
        client: LLMClient,
        group: str,
    ) -> list[AskedRound]:
        methods = _fleet_stubs(await self._registry())
        recordings = {one.round_id: one for one in turn.recordings}
        rounds, variables = [], KeptVariables()
        for item in turn.rounds:
            recording = recordings.get(item.id)
            if item.id in prompts:
                request = LLMRequest(
                    messages=tuple(_message(one, self._check_word(item)) for one in prompts[item.id]),
                    round_id=item.id,
                    chat_key=turn.chat_key,
                    group=group,
                )
                answer = await self._answer(client, request)
                asked = self._judged(item, recording, request, answer, methods)
                rounds.append(await self._run(item, recording, asked, variables, methods))
            if recording is not None:
                variables = (await self._programs.run(recording, variables)).variables
        return rounds

    async def _answer(self, client: LLMClient, request: LLMRequest) -> LLMAnswer:
        tokens = tokens_of_prompt(request.messages)
        entry = chat_entry(self._settings, request, kind="replay", prompt_tokens=tokens)
        meter = self._spending().meter(entry)
        await meter.admit()
        return await ask_admitted(meter, client, request)

    def _judged(
        self,
        item: Round,
        recording: Recording | None,
        request: LLMRequest,
        answer: LLMAnswer,
        methods: Sequence[StubMethod],
    ) -> AskedRound:
        """Decide on an answer as a rounds worker does, but for the limits of a turn."""
        reply = self._read(answer, methods)
        decided = judge_reply(
            answer,
            reply,
            check_word=self._check_word(item),
            previous=(),
            most_bytes=self._settings.sandbox.argument_bytes,
            is_last=False,
        )
        code = reply.extracted.code if decided is None and reply.extracted is not None else None
        words = None if decided is None else decided.words
        code_before = None if recording is None else recording.code
        differences = []
        if decided is not None and words is None:
            text = f"neither a program nor a message: {decided.reason[:_MOST_REASON_CHARS]}"
            if code_before is not None or item.code is None:
                differences.append(Difference(kind="end", text=text))
        elif words is not None and item.code is None:
            before = self._read(replace(answer, text=item.answer or "", finish_reason="stop"), methods)
            differences += text_difference("words", before.words, words)
        elif words is not None:
            differences.append(Difference(kind="words", text="a message, and before a program"))
        elif code_before is None:
            differences.append(Difference(kind="words", text="a program, and before none"))
        return AskedRound(
            number=item.number,
            answer=answer,
            prompt_chars=item.prompt_chars,
            sent_chars=request.chars,
            code_before=code_before,
            code=code,
            words=words,
            differences=differences,
        )

    def _check_word(self, item: Round) -> str:
        return check_word_of(self._secrets.check_word(item.id))

    def _read(self, answer: LLMAnswer, methods: Sequence[StubMethod]) -> Reply:
        if self._settings.agent.answers is AnswerMode.STRICT:
            extracted = read_program(answer.text)
            return Reply(kind=ReplyKind.PROGRAM, extracted=extracted, reasoning=extracted.reasoning)
        return read_reply(answer, {name for one in methods for name in (one.name, one.path) if name})

    async def _run(
        self,
        item: Round,
        recording: Recording | None,
        asked: AskedRound,
        variables: KeptVariables,
        methods: Sequence[StubMethod],
    ) -> AskedRound:
        """Run the program of an answer; what it does otherwise is a difference."""
        if asked.code is None:
            return asked
        if recording is None:
            recording = Recording(
                round_id=item.id,
                number=item.number,
                chat_key=item.chat_key,
                code="",
                seed=self._secrets.seed(item.id),
                readings="",
                new_ids=lambda: CallIds(self._secrets.ids(item.id)).next,
                calls={},
                stop_type=None,
                output=None,
            )
        known = {method.path for method in methods}
        more = [method for method in stubs_of(recording) if method.path not in known]
        program = await self._programs.run(
            replace(recording, code=asked.code), variables, methods=[*methods, *more]
        )
        return replace(asked, program=program, differences=[*asked.differences, *program.differences])


def _fleet_stubs(registry: Registry) -> list[StubMethod]:
    """Return the methods that programs may call now, as code sees them."""
    named: list[tuple[MethodEntry, str | None]] = []
    for entry in registry.enabled():
        named += [(entry, name) for name in registry.bare_names(entry) or (None,)]
    named += [(entry, entry.name) for entry in built_in_entries(in_round=True)]
    return [
        StubMethod(
            token=f"fleet_{number}",
            name=name,
            path=entry.task,
            signature=entry.signature,
            doc=entry.doc,
            type=entry.type,
            timeout_seconds=None,
        )
        for number, (entry, name) in enumerate(named)
    ]


def _message(kept: Mapping[str, Any], check_word: str) -> PromptMessage:
    """Return a message of a kept prompt; see ``nekro.agent.llm.telemetry.message_json``."""
    parts = tuple(_part(part, check_word) for part in kept["parts"])
    return PromptMessage(role=PromptRole(kept["role"]), parts=parts)


def _part(kept: Mapping[str, Any], check_word: str) -> Part:
    if kept["type"] == "text":
        return TextPart(text=restore_check_word(kept["content"], check_word))
    if kept["type"] == "uri":
        return ImagePart(url=kept["uri"])
    return TextPart(text=f"[an image that is not kept: {kept['mime_type']}, {kept['bytes']} bytes]")
