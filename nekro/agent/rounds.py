"""One round: prompt, answer, run of the code, and the decision what follows.

Independent of Celery and SQL: the caller loads the input, provides the function that dispatches
plugin calls, and records the outcome.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final, Protocol

from broker_config.model_groups import Vision
from broker_config.settings import AgentSettings, AnswerMode, SandboxSettings
from nekro.agent import loops, verdict
from nekro.agent.answers.live_words import LiveWords, ends_unopened_reasoning
from nekro.agent.answers.replies import Reply, ReplyKind, read_program, read_reply
from nekro.agent.llm import LLMAnswer, LLMClient, LLMRequest, ModelSpent
from nekro.agent.model import (
    ChatBrief,
    HistoryMessage,
    HistorySummary,
    InjectedPrompt,
    KeptNames,
    Observation,
    PluginBrief,
    PromptMessage,
    TurnRound,
)
from nekro.agent.pictures.fit import PromptPictures
from nekro.agent.program_check import Misfit, findings_of
from nekro.agent.prompt import PromptBuilder, PromptRequest, collect_injected
from nekro.agent.room import ModelContexts, PromptRoom
from nekro.agent.text import check_word_of, reveals_check_word
from nekro.agent.verdict import Verdict, judge_reply
from nekro.broker.tracing import span
from nekro.sandbox.models import (
    Dispatch,
    KeptVariables,
    RunRequest,
    RunResult,
    StopType,
    StubMethod,
    random_call_id,
)
from nekro.sandbox.undo import NotUndoneError
from nekro_agent.errors import BudgetExceededError, LLMError
from nekro_agent.shared_clock import shared_time
from storage.repositories.round_values import RoundReport

if TYPE_CHECKING:
    from nekro.sandbox.manager import SandboxManager

__all__ = ["Resumption", "RoundBudget", "RoundInput", "RoundOutcome", "RoundRunner"]

#: Time of a turn that is reserved for the program of its last answer, which could not run otherwise.
_LEAST_RUN_SECONDS: Final = 1.0


class RoundBudget(Protocol):
    """What a round may spend, and has spent."""

    async def reserve(self, *, prompt_tokens: int, answer_tokens: int, sandbox_seconds: float) -> None:
        """Count what the round is expected to use, before the model is asked.

        Raises:
            BudgetExceededError: a budget is used up; the model must not be asked.
        """
        ...

    async def reserve_run(self, *, sandbox_seconds: float) -> None:
        """Count what a program is expected to use that is run again; no model is asked.

        Raises:
            BudgetExceededError: as from ``reserve``; the program must not run.
        """
        ...

    def spent(self, spent: ModelSpent) -> None:
        """Add what one request used."""
        ...


@dataclass(frozen=True, kw_only=True)
class Resumption:
    """A program that is run again because its worker died."""

    code: str
    #: As ``RunRequest.readings``.
    readings: str
    #: Returns what its recorded calls did, for the model, if it took another course than before; None if not.
    divergence: Callable[[], str | None]


@dataclass(frozen=True, kw_only=True)
class RoundInput:
    """The input of a round.

    ``history`` is oldest first and reaches from before the turn until now; ``previous`` are
    the turn's earlier rounds, ``observations`` the results that none of them caused.
    ``dispatch`` sends one plugin call to a worker; in the last round of a turn
    (``RoundRunner.is_last``) it must not let a call request a follow-up round.
    ``on_answer`` is awaited with what is recorded of the answer before the code runs; if it raises, the code
    does not run. It is not called for an answer in words: that round may start again until the caller has
    recorded its outcome.
    ``on_request`` receives each request that is sent, ``on_delta`` is as in ``LLMRequest``;
    ``on_words`` receives, for each request, the words for people in its answer as soon as they are certain.
    """

    round_id: str
    chat: ChatBrief
    #: Position in the turn, from 1.
    number: int
    turn_started_at: datetime
    history: Sequence[HistoryMessage]
    plugins: Sequence[PluginBrief]
    methods: Sequence[StubMethod]
    dispatch: Dispatch
    #: Of the program, as ``RunRequest.seed``, and of the word in the prompt: 64 hexadecimal digits.
    seed: str = field(default_factory=lambda: secrets.token_hex(32), repr=False)
    check_seed: str = field(default_factory=lambda: secrets.token_hex(32), repr=False)
    #: As in ``RunRequest``.
    program_id: str | None = None
    #: As ``RunRequest.call_id``; None: ids are random.
    call_id: Callable[[str, bytes, str], str] | None = None
    #: Run this instead of asking the model; None: ask it.
    resumes: Resumption | None = None
    #: Checks a call of a program before it runs; None: programs are not checked.
    misfit: Misfit | None = None
    previous: Sequence[TurnRound] = ()
    observations: Sequence[Observation] = ()
    #: Of messages before those of ``history``, or of some of these; None: there is none.
    summary: HistorySummary | None = None
    #: What the turn's last program left for the next one; None: nothing is known.
    variables: KeptVariables | None = None
    #: As ``RunRequest.fence``.
    fence: int | None = None
    #: None means the persona of the settings.
    persona: str | None = None
    #: As ``LLMRequest.group``.
    model_group: str | None = None
    #: Whether a model of the chat sees images, and their detail.
    vision: Vision = field(default_factory=Vision)
    #: Returns ``PromptRequest.recent``; awaited only if the list of methods is too long. None: no method.
    recent: Callable[[], Awaitable[Sequence[str]]] | None = None
    #: None: nothing is counted.
    budget: RoundBudget | None = None
    on_request: Callable[[LLMRequest], None] | None = None
    on_delta: Callable[[int, str], None] | None = None
    on_words: Callable[[int, str], None] | None = None
    on_answer: Callable[[RoundReport, LLMAnswer], Awaitable[None]] | None = None
    on_output: Callable[[str], None] | None = None


@dataclass(frozen=True, kw_only=True)
class RoundOutcome:
    """How a round ended, and what follows.

    ``needs_follow_up`` says that the turn continues: for an AGENT or MULTIMODAL_AGENT result
    the next round is already requested, for every other stop type the caller requests it.
    ``notice`` is a text for the people in the chat when the turn ended before its work was done, and
    ``notice_code`` names why; else None. ``words`` is the answer to them that the caller sends, or None.
    """

    #: What is recorded of it, without its calls. ``stop_type`` is None when the turn's limits did not allow
    #: asking the model or running its code; ``error`` is for the model, in the turn's next prompt; an answer
    #: in words has no ``code``.
    report: RoundReport
    needs_follow_up: bool
    notice: str | None
    notice_code: str | None
    words: str | None
    llm: LLMAnswer | None = None
    run: RunResult | None = None


class _OutOfTimeError(Exception):
    """The turn's time ended during this round; never leaves this module."""


class RoundRunner:
    """Runs rounds; one instance serves all chats of a process.

    Args:
        contexts: knows the contexts of the models; None: nothing is known of them.
        redact: removes secrets and host paths from error messages of plugins.
    """

    def __init__(
        self,
        *,
        llm: LLMClient,
        sandbox: SandboxManager,
        agent_settings: AgentSettings,
        sandbox_settings: SandboxSettings,
        contexts: ModelContexts | None = None,
        redact: Callable[[str], str] = str,
    ) -> None:
        self.llm = llm
        self.sandbox = sandbox
        self.agent = agent_settings
        self.limits = sandbox_settings
        self.prompts = PromptBuilder(agent_settings, sandbox_settings)
        self.pictures = PromptPictures(agent_settings)
        self.contexts = contexts or ModelContexts(agent_settings)
        self.redact = redact
        #: Model groups that once answered with reasoning that has a closing tag but no opening one.
        self.unopened: set[str | None] = set()

    def is_last(self, number: int) -> bool:
        """Whether a round with this number is the last one of its turn."""
        return number >= self.agent.rounds_per_turn

    async def forget(self, round_input: RoundInput) -> None:
        """Remove what a round's program has saved for another attempt: its end is recorded."""
        if round_input.program_id is not None:
            await self.sandbox.forget(
                round_input.program_id,
                chat_key=round_input.chat.chat_key,
                container_key=round_input.chat.container_key,
                fence=round_input.fence,
            )

    async def note_ends(self, round_input: RoundInput) -> None:
        """Note how a round's program, which waits, has left its files; see ``SandboxManager.note_ends``."""
        if round_input.program_id is not None:
            await self.sandbox.note_ends(
                round_input.program_id,
                chat_key=round_input.chat.chat_key,
                container_key=round_input.chat.container_key,
                fence=round_input.fence,
            )

    def run(self, round_input: RoundInput) -> Coroutine[Any, Any, RoundOutcome]:
        """Run one round.

        The model is not asked for an answer that could not run: a round beyond the turn's limits
        ends the turn with a notice instead.

        Raises:
            LLMError: the model gave no answer.
            SandboxError: no sandbox could be started.
        """
        return _Round(round_input, self).run()


class _Round:
    """One running round and its results so far."""

    def __init__(self, round_input: RoundInput, runner: RoundRunner) -> None:
        self._input = round_input
        self._runner = runner
        self._agent = runner.agent
        self._limits = runner.limits
        self._contexts = runner.contexts
        self._is_last = runner.is_last(round_input.number)
        self._check_word = check_word_of(round_input.check_seed)
        self._word_in_call = False
        self._asked_at = shared_time()
        self._prompt_chars = 0
        self._answer: LLMAnswer | None = None
        #: What is known of the answer.
        self._report = RoundReport()
        self._result: RunResult | None = None
        self._output = ""
        self._names = {name for one in round_input.methods for name in (one.name, one.path) if name}
        #: The number of the request whose answer arrives, and its words.
        self._live: tuple[int, LiveWords] | None = None

    async def run(self) -> RoundOutcome:
        """See ``RoundRunner.run``."""
        try:
            decided = await self._carry_out()
        except _OutOfTimeError:
            decided = verdict.time_used_up(self._agent.turn_seconds)
        except BudgetExceededError as exc:
            decided = verdict.budget_used_up(str(exc))
        if decided.wants_more:
            decided = self._unless_repeated(decided)
        if decided.wants_more and self._is_last:
            decided = verdict.last_round(decided, self._agent.rounds_per_turn)
        return self._outcome(decided)

    async def _carry_out(self) -> Verdict:
        """Ask the model, then run the code of its answer; or run that of an earlier attempt again."""
        if self._input.resumes is not None:
            return await self._resume(self._input.resumes)
        if self._input.number > self._agent.rounds_per_turn:
            return verdict.rounds_used_up(self._agent.rounds_per_turn)
        if self._seconds_to_ask() <= 0:
            raise _OutOfTimeError
        answer = await self._answered()
        reply = self._read(answer)
        code = reply.extracted.code if reply.extracted else ""
        self._answer = answer
        self._report = RoundReport(
            prompt_chars=self._prompt_chars,
            model=answer.model,
            answer=answer.text,
            code=code,
            prompt_tokens=answer.prompt_tokens,
            completion_tokens=answer.answer_tokens,
            tokens_estimated=answer.is_estimated,
            cost=answer.cost,
        )
        decided = judge_reply(
            answer,
            reply,
            check_word=self._check_word,
            previous=self._input.previous,
            most_bytes=self._limits.argument_bytes,  # as for messages that methods send
            is_last=self._is_last,
        )
        decided = decided or self._refused(code)
        reason = "" if self._agent.journal_bytes else "NEKRO_AGENT__JOURNAL_BYTES is 0"
        self._report = replace(
            self._report, not_resumable="it was not run" if decided is not None else reason
        )
        if self._input.on_answer is not None and (decided is None or decided.words is None):
            await self._input.on_answer(self._report, answer)
        return decided or await self._run(code)

    async def _resume(self, resumption: Resumption) -> Verdict:
        """Run a program again; what it did before is in its journal."""
        if self._input.budget is not None:
            await self._input.budget.reserve_run(sandbox_seconds=self._limits.wall_seconds)
        try:
            decided = await self._run(resumption.code, readings=resumption.readings)
        except NotUndoneError as exc:
            return verdict.not_undone(str(exc), resumption.divergence() or "")
        calls = resumption.divergence()
        if calls is None or decided.stop_type in (StopType.SECURITY, StopType.TIMEOUT):
            return decided
        return verdict.diverged(calls)

    def _refused(self, code: str) -> Verdict | None:
        """Return the decision on a program that cannot work; None if nothing in it is certain to fail."""
        given = self._input
        if given.misfit is None:
            return None
        kept = () if given.variables is None else given.variables.values
        found = findings_of(code, given.methods, kept=kept, misfit=given.misfit)
        return verdict.program_unfit(found) if found else None

    def _unless_repeated(self, decided: Verdict) -> Verdict:
        """Return the decision on a round that needs another one; a repeated error ends the turn."""
        if decided.stop_type is None:
            return decided
        this = TurnRound(
            number=self._input.number,
            asked_at=self._asked_at,
            answer="",
            stop_type=decided.stop_type,
            reason=decided.reason,
            output=self._output,
        )
        if loops.repeats_of_error(this, self._input.previous) + 1 < loops.MOST_REPEATS:
            return decided
        return verdict.error_repeated(decided, loops.error_of(this))

    def _outcome(self, decided: Verdict) -> RoundOutcome:
        report = replace(
            self._report,
            prompt_chars=None if self._input.resumes is not None else self._prompt_chars,
            code=None if decided.words is not None else self._report.code,
            not_resumable=None,
            stop_type=None if decided.stop_type is None else int(decided.stop_type),
            exit_code=None if self._result is None else self._result.exit_code,
            output=self._output,
            error=decided.reason or None,
        )
        return RoundOutcome(
            report=report,
            needs_follow_up=decided.wants_more,
            notice=decided.notice,
            notice_code=None if decided.notice is None else decided.code,
            words=decided.words,
            llm=self._answer,
            run=self._result,
        )

    async def _answered(self) -> LLMAnswer:
        """Ask the model; once more with a shorter prompt if an endpoint calls this one too long."""
        group = self._input.model_group
        injected = await collect_injected(self._input.plugins, redact=self._runner.redact)
        room = await self._contexts.room(group)
        messages = await self._messages(injected, room)
        await self._reserve(room.tokens_of(messages))
        try:
            return await self._ask(self._request(messages))
        except LLMError as exc:
            if not exc.is_too_long:
                raise
            tokens = room.tokens_of(messages)
            self._contexts.learn(group, tokens=tokens, said=str(exc))
            room = await self._contexts.room(group)
            messages = await self._messages(injected, room)
            if room.tokens_of(messages) >= tokens:
                raise
            tries = exc.tries
        answer = await self._ask(self._request(messages))
        return replace(answer, tries=tries + answer.tries)

    async def _reserve(self, prompt_tokens: int) -> None:
        if self._input.budget is not None:
            await self._input.budget.reserve(
                prompt_tokens=prompt_tokens,
                answer_tokens=self._agent.answer_tokens,
                sandbox_seconds=self._limits.wall_seconds,
            )

    async def _messages(
        self, injected: Sequence[InjectedPrompt], room: PromptRoom
    ) -> tuple[PromptMessage, ...]:
        given = self._input
        recent: Sequence[str] = ()
        if given.recent is not None and self._runner.prompts.shortens(given.plugins, room):
            recent = await given.recent()
        request = PromptRequest(
            chat=given.chat,
            plugins=given.plugins,
            injected=injected,
            history=given.history,
            previous=given.previous,
            observations=given.observations,
            number=given.number,
            check_word=self._check_word,
            now=self._asked_at,
            persona=given.persona,
            recent=recent,
            summary=given.summary,
            variables=_names(given.variables),
            room=room,
        )
        # A tokenizer takes long; estimates are bounded by the limits and take less than the templates.
        if room.counter.is_exact:
            messages = await asyncio.to_thread(self._runner.prompts.build, request)
        else:
            messages = self._runner.prompts.build(request)
        vision = given.vision
        return await self._runner.pictures.fit(
            messages, sees=vision.sees, detail=vision.detail, most_tokens=room.limits.images
        )

    def _request(self, messages: tuple[PromptMessage, ...]) -> LLMRequest:
        given = self._input
        request = LLMRequest(
            messages=messages,
            round_id=given.round_id,
            chat_key=given.chat.chat_key,
            group=given.model_group,
            on_delta=self._take_delta,
            on_spent=None if given.budget is None else given.budget.spent,
        )
        self._prompt_chars = request.chars
        return request

    def _take_delta(self, number: int, piece: str) -> None:
        """Pass on a piece of an answer, and the words that it makes certain."""
        given = self._input
        if given.on_delta is not None:
            given.on_delta(number, piece)
        if given.on_words is None or self._agent.answers is AnswerMode.STRICT:
            return
        if self._live is None or self._live[0] != number:
            words = LiveWords(
                self._names,
                check_word=self._check_word,
                most_bytes=self._limits.argument_bytes,
                waits_for_end=given.model_group in self._runner.unopened,
            )
            self._live = (number, words)
        if found := self._live[1].add(piece):
            given.on_words(number, found)

    async def _ask(self, request: LLMRequest) -> LLMAnswer:
        if self._input.on_request is not None:
            self._input.on_request(request)
        self._live = None
        try:
            async with asyncio.timeout(self._seconds_to_ask()) as limit:
                return await self._runner.llm.complete(request)
        except TimeoutError as exc:
            if not limit.expired():
                raise
            raise _OutOfTimeError from exc

    def _read(self, answer: LLMAnswer) -> Reply:
        if self._agent.answers is AnswerMode.STRICT:
            extracted = read_program(answer.text)
            return Reply(kind=ReplyKind.PROGRAM, extracted=extracted, reasoning=extracted.reasoning)
        if ends_unopened_reasoning(answer.text):
            self._runner.unopened.add(self._input.model_group)
        return read_reply(answer, self._names)

    async def _run(self, code: str, *, readings: str = "") -> Verdict:
        wall_seconds = min(self._limits.wall_seconds, max(self._seconds_left(), _LEAST_RUN_SECONDS))
        request = RunRequest(
            run_id=self._input.round_id,
            chat_key=self._input.chat.chat_key,
            container_key=self._input.chat.container_key,
            fence=self._input.fence,
            code=code,
            methods=self._input.methods,
            dispatch=self._input.dispatch,
            call_id=self._input.call_id or random_call_id,
            seed=self._input.seed,
            readings=readings,
            program_id=self._input.program_id,
            is_forbidden=self._reveals_word,
            wall_seconds=wall_seconds,
            keep_bytes=self._limits.keep_variables_bytes if self._limits.keep_variables else 0,
            variables={} if self._input.variables is None else self._input.variables.values,
            on_output=self._input.on_output,
        )
        with span("sandbox.run", {"run_id": request.run_id}) as part:
            self._result = result = await self._runner.sandbox.run(request)
            part.set_attributes(stop_type=result.stop_type.name)
        if self._word_in_call or reveals_check_word(self._check_word, result.output):
            return verdict.word_revealed()
        self._output = result.output
        return verdict.judge(result, wall_seconds=wall_seconds, max_calls=self._limits.max_calls)

    def _reveals_word(self, arguments: bytes) -> bool:
        """Whether the arguments of a call contain the check word; then the call is not made."""
        found = reveals_check_word(self._check_word, arguments)
        self._word_in_call |= found
        return found

    def _seconds_left(self) -> float:
        gone = (shared_time() - self._input.turn_started_at).total_seconds()
        return self._agent.turn_seconds - gone

    def _seconds_to_ask(self) -> float:
        """Time limit of the model's answer that leaves time for its program to run."""
        return self._seconds_left() - _LEAST_RUN_SECONDS


def _names(variables: KeptVariables | None) -> KeptNames | None:
    if variables is None:
        return None
    return KeptNames(kept=tuple(variables.values), not_kept=variables.not_kept)
