"""Builds the messages of one LLM request.

Parts that change least come first, so that an endpoint's prompt cache stays valid through a turn:
the system prompt with the catalogue, the history as the turn's first round saw it, then each
earlier round as its answer and its results. What is new in every round (the plugins' injected
prompts, round numbers, time, check word) comes last."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from typing import Final

from jinja2 import Environment, PackageLoader, StrictUndefined
from loguru import logger

from broker_config.settings import AgentSettings, AnswerMode, SandboxSettings
from nekro.agent.catalogue import CatalogueWriter
from nekro.agent.history import (
    Segment,
    render_history,
    render_images,
    render_summary,
    render_time,
    split_by_round,
    without_covered,
)
from nekro.agent.loops import makes_no_progress
from nekro.agent.model import (
    ChatBrief,
    HistoryMessage,
    HistorySummary,
    InjectedPrompt,
    KeptNames,
    MethodBrief,
    Observation,
    Part,
    PluginBrief,
    PromptMessage,
    PromptRole,
    TextPart,
    TurnRound,
    join_parts,
)
from nekro.agent.multimodal import render_segments
from nekro.agent.room import PromptRoom, TokenLimits
from nekro.agent.text import attribute, cut_text, method_text, neutralise
from nekro.agent.text import handle_of_output as of_output
from nekro.agent.text import handle_of_result as of_result
from nekro.sandbox.models import StopType
from nekro_agent.core.logger import log_failure, missing_name
from nekro_agent.durations import HOOK_SECONDS
from nekro_agent.methods import BUILT_IN_METHODS, SandboxMethodType

__all__ = [
    "HOOK_SECONDS",
    "PromptBuilder",
    "PromptRequest",
    "collect_injected",
    "order_plugins",
]


_ERROR_CHARS: Final = 300


async def collect_injected(
    plugins: Sequence[PluginBrief],
    *,
    redact: Callable[[str], str],
) -> list[InjectedPrompt]:
    """Run the plugins' inject methods concurrently; return their results in the plugins' order.

    A plugin that fails or takes too long loses only its own text; the prompt states the error there, but not
    that the plugin uses a name that does not exist here.
    """
    return await asyncio.gather(
        *(_inject(plugin.key, plugin.inject, redact) for plugin in plugins if plugin.inject is not None)
    )


async def _inject(
    key: str, inject: Callable[[], Awaitable[str]], redact: Callable[[str], str]
) -> InjectedPrompt:
    try:
        async with asyncio.timeout(HOOK_SECONDS) as limit:
            text = await inject()
    except BaseException as exc:  # plugin code: a SystemExit from it must not end the worker
        if _is_ours(exc):
            raise
        error = f"{type(exc).__name__}: {redact(str(exc))}"[:_ERROR_CHARS]
        if isinstance(exc, TimeoutError) and limit.expired():
            error = f"no answer within {HOOK_SECONDS:g} s"
        log_failure(logger.bind(plugin=key), "inject_failed", exc, plugin_key=key, level="WARNING")
        if missing_name(exc) is not None:  # the model can do nothing about it, in no round
            return InjectedPrompt(plugin=key, text="")
        return InjectedPrompt(plugin=key, error=error)
    return InjectedPrompt(plugin=key, text="" if text is None else str(text))


def _is_ours(exc: BaseException) -> bool:
    """Whether the exception is the cancellation of this task and not an error of the plugin."""
    task = asyncio.current_task()
    return isinstance(exc, asyncio.CancelledError) and task is not None and task.cancelling() > 0


_STOPPED_AT_CALL: Final = "The program ended at the call of an AGENT method; code after the call did not run."

_REASONS: Final = {
    StopType.NORMAL: "The program ended normally.",
    StopType.ERROR: "The program ended with an error.",
    StopType.TIMEOUT: "The program ran too long and was stopped.",
    StopType.AGENT: _STOPPED_AT_CALL,
    StopType.MANUAL: "The program ended itself with exit(9) to look at its output.",
    StopType.SECURITY: "The program was stopped because it broke a safety rule of this system.",
    StopType.MULTIMODAL_AGENT: _STOPPED_AT_CALL,
    StopType.APPROVAL: (
        "The program ended at a call that a person must approve. The call has not run, unless a result below "
        "says so; code after it did not run. Do not make the call again while it waits."
    ),
    StopType.WAITING: (
        "The program waits at a call, without running, and goes on there by itself. Do not write the rest of "
        "it again."
    ),
    StopType.DIVERGED: "The program was run again to go on where it had been, and stopped on another course.",
}
#: The built-in methods that a prompt explains if its list is shortened, and if it has plugins that sleep.
_BUILT_IN: Final = {
    reason: [method_text(MethodBrief(**vars(BUILT_IN_METHODS[name]))) for name in names]
    for reason, names in (
        ("short", ("help_of", "search_tools")),
        ("asleep", ("activate_plugin", "extend_plugin_activation")),
    )
}
#: Hint for the model after a syntax error, by how answers without a program are treated.
_SYNTAX_HINTS: Final = {
    AnswerMode.STRICT: "Python could not read your answer. It has to end with exactly one fenced block of "
    "Python; mind quotes and fences inside strings.",
    AnswerMode.WORDS: "Python could not read your program. A block without a label counts as Python; mind "
    "quotes and fences inside strings.",
}

_NO_PROGRESS: Final = (
    "That brought nothing new. Try another way, or tell the people in the chat what does not work; to repeat "
    "it ends the turn."
)

_SAID: Final = "Your answer was sent to the chat as it is."
#: Parts that are kept, about those of the turns that one worker runs at once.
_MOST_KEPT: Final = 256
#: How often the limits of a prompt that is too long are lowered: to a 64th.
_MOST_LOWERED: Final = 6


@dataclass(frozen=True, kw_only=True)
class PromptRequest:
    """The input of one prompt.

    ``history`` is oldest first and reaches from before the turn to now; ``observations`` are
    results that no round in ``previous`` caused (a job's report, a run from the command line).
    """

    chat: ChatBrief
    plugins: Sequence[PluginBrief]
    injected: Sequence[InjectedPrompt]
    history: Sequence[HistoryMessage]
    previous: Sequence[TurnRound]
    observations: Sequence[Observation]
    number: int
    check_word: str
    now: datetime
    persona: str | None = None
    #: Names of the methods that the chat used before this turn, the last used first; used if the list of
    #: methods is too long (``PromptBuilder.shortens``).
    recent: Sequence[str] = ()
    #: Stands for the messages of ``history`` that it covers, and for older ones; None: there is none.
    summary: HistorySummary | None = None
    #: None: variables are not kept, or no program of the turn has run.
    variables: KeptNames | None = None
    #: None: the room of an unknown model.
    room: PromptRoom | None = None


@functools.cache
def _templates() -> Environment:
    """The templates of this package; each is compiled once in a process."""
    templates = Environment(
        loader=PackageLoader("nekro.agent"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        auto_reload=False,
        autoescape=False,  # noqa: S701 - prompts are text; `nekro.agent.text` protects our own tags
    )
    templates.filters["attribute"] = attribute
    return templates


class PromptBuilder:
    """Renders prompts from the templates of this package; thread-safe."""

    def __init__(self, agent: AgentSettings, sandbox: SandboxSettings) -> None:
        self._agent = agent
        self._sandbox = sandbox
        self._templates = _templates()
        self._catalogue = CatalogueWriter(self._templates)
        self._room = PromptRoom(limits=TokenLimits.of(agent, context=None))
        #: The last system prompt and its input, which are usually the same in all rounds of a turn.
        self._last_system: tuple[object, str] = (None, "")
        #: The opening and the earlier rounds of chats with their input, for the next prompts of a turn.
        self._known_parts: dict[tuple[str, int], tuple[object, tuple[Part, ...]]] = {}

    def shortens(self, plugins: Iterable[PluginBrief], room: PromptRoom | None = None) -> bool:
        """Whether the list of these plugins' methods exceeds the budget, so that ``recent`` is needed."""
        return self._catalogue.is_long(order_plugins(plugins), room or self._room)

    def build(self, request: PromptRequest) -> tuple[PromptMessage, ...]:
        """Return the system message, the history, and a pair of messages for each earlier round.

        If they exceed the room of the prompt, all of its parts are shortened alike until they fit, and at
        last the oldest of the earlier rounds are left out. Then only the fixed text of the system prompt can
        be longer than the room.
        """
        room = request.room or self._room
        for _ in range(_MOST_LOWERED):
            messages = self._build(request, room)
            if room.tokens_of(messages) <= room.limits.prompt:
                return messages
            room = replace(room, limits=room.limits.lowered())
        messages = self._build(request, room)
        shown = len(request.previous)
        while shown > 1 and room.tokens_of(messages) > room.limits.prompt:
            shown //= 2
            messages = self._build(request, room, shown=shown)
        return messages

    def _build(
        self, request: PromptRequest, room: PromptRoom, *, shown: int | None = None
    ) -> tuple[PromptMessage, ...]:
        """Build a prompt within the limits of each part; of earlier rounds the last ``shown``, None: all."""
        previous = sorted(request.previous, key=lambda earlier: earlier.number)
        left_out = 0 if shown is None else len(previous) - shown
        previous = previous[left_out:]
        segments = split_by_round(_unrepeated(request), [earlier.asked_at for earlier in previous])
        key = request.chat.chat_key
        opening = (segments[0], request.chat, request.summary, tuple(request.observations), room, left_out)
        user_messages = [
            self._parts(
                (key, 0), opening, lambda: self._opening(segments[0], request, room, left_out=left_out)
            )
        ]
        for position, (ended, segment) in enumerate(zip(previous, segments[1:], strict=True)):
            before = tuple(previous[:position])
            run = partial(self._run, ended, segment, before, room)
            user_messages.append(self._parts((key, position + 1), (ended, segment, before, room), run))
        user_messages[-1] += (TextPart(text=self._footer(request, room)),)
        messages = [PromptMessage.of(PromptRole.SYSTEM, self._system(request, room))]
        for earlier, parts in zip([None, *previous], user_messages, strict=True):
            if earlier is not None:
                messages.append(PromptMessage.of(PromptRole.ASSISTANT, _answer(earlier, room)))
            messages.append(PromptMessage(role=PromptRole.USER, parts=join_parts(parts)))
        return tuple(messages)

    def _parts(
        self, key: tuple[str, int], given: object, render: Callable[[], list[Part]]
    ) -> tuple[Part, ...]:
        """Return what was rendered of the same input, else render it.

        A turn's rows and messages are read once, so that comparing them takes no time.
        """
        known, parts = self._known_parts.get(key, (None, ()))
        if known != given:
            if len(self._known_parts) >= _MOST_KEPT:
                self._known_parts.clear()
            parts = join_parts(render())
            self._known_parts[key] = (given, parts)
        return parts

    def _system(self, request: PromptRequest, room: PromptRoom) -> str:
        from nekro.sandbox.packages.base import (
            named_packages,  # here: a gateway imports this module, not that one
        )

        persona = (request.persona or self._agent.persona).strip()
        catalogue = self._catalogue.write(order_plugins(request.plugins), room, request.recent)
        packages = named_packages(self._sandbox)
        shown = (persona, catalogue, packages)
        known, text = self._last_system
        if shown != known:
            text = self._templates.get_template("system.j2").render(
                persona=persona,
                wall_seconds=f"{self._sandbox.wall_seconds:g}",
                memory_mib=self._sandbox.memory_bytes >> 20,
                max_calls=self._sandbox.max_calls,
                rounds_per_turn=self._agent.rounds_per_turn,
                words=self._agent.answers is AnswerMode.WORDS,
                packages=packages,
                figures=self._sandbox.figures,
                waits=self._agent.journal_bytes > 0,
                keeps_variables=self._sandbox.keep_variables,
                variables_kib=self._sandbox.keep_variables_bytes >> 10,
                catalogue=catalogue,
                built_in=_BUILT_IN,
            )
            self._last_system = (shown, text)
        return text

    def _opening(
        self, segment: Segment, request: PromptRequest, room: PromptRoom, *, left_out: int
    ) -> list[Part]:
        name = attribute(request.chat.channel_name or request.chat.chat_key)
        summary = "" if request.summary is None else render_summary(request.summary, room)
        body = self._history(segment, room, taken=room.counter.count(summary))
        body = "\n".join(text for text in (summary, body) if text) or "[no messages yet]"
        parts: list[Part] = [TextPart(text=f'<chat_history chat="{name}">\n{body}\n</chat_history>')]
        parts += render_images(segment)
        for observation in request.observations:
            parts += self._observation(observation, room)
        if left_out:
            parts.append(TextPart(text=f"[the first {left_out} rounds of this turn are not shown]"))
        return parts

    def _history(self, segment: Segment, room: PromptRoom, *, taken: int = 0) -> str:
        return render_history(segment, room, most=self._agent.history_messages, taken=taken)

    def _run(
        self, earlier: TurnRound, segment: Segment, before: Sequence[TurnRound], room: PromptRoom
    ) -> list[Part]:
        # Output of a run that broke a safety rule may contain the confidential text itself.
        output = "" if earlier.stop_type is StopType.SECURITY else earlier.output
        is_said = earlier.code is None
        run = self._templates.get_template("run.j2").render(
            number=earlier.number,
            ended=earlier.stop_type.name,
            reason=neutralise(earlier.reason or (_SAID if is_said else _REASONS[earlier.stop_type])),
            hints=self._hints(earlier, before),
            output=cut_text(
                output, room.limits.observation, room.counter, handle=of_output(earlier.round_id)
            ).strip("\n"),
            is_silent=is_said or bool(earlier.observations),
        )
        parts: list[Part] = [TextPart(text=run)]
        for observation in earlier.observations:
            parts += self._observation(observation, room)
        if segment.messages:
            news = self._history(segment, room)
            parts.append(TextPart(text=f"<new_messages>\n{news}\n</new_messages>"))
            parts += render_images(segment)
        return parts

    def _hints(self, earlier: TurnRound, before: Sequence[TurnRound]) -> list[str]:
        hints = []
        if earlier.stop_type is StopType.ERROR and "SyntaxError" in earlier.output:
            hints.append(_SYNTAX_HINTS[self._agent.answers])
        if makes_no_progress(earlier, before):
            hints.append(_NO_PROGRESS)
        return hints

    def _observation(self, observation: Observation, room: PromptRoom) -> list[Part]:
        method = f' method="{attribute(observation.method)}"' if observation.method else ""
        head = TextPart(text=f"<agent_result{method}>")
        tail = TextPart(text="</agent_result>")
        if observation.type is SandboxMethodType.MULTIMODAL_AGENT:
            body = render_segments(observation.segments, image_bytes=self._agent.image_file_bytes)
            shown = [
                _cut_part(part, room, of_result(observation.call_id, index))
                for index, part in enumerate(body)
            ]
            return [head, *shown, tail]
        text = cut_text(
            observation.text,
            room.limits.observation,
            room.counter,
            handle=of_result(observation.call_id),
        )
        return [head, TextPart(text=text or "[the method returned no text]"), tail]

    def _footer(self, request: PromptRequest, room: PromptRoom) -> str:
        injected = [prompt for prompt in request.injected if prompt.text.strip() or prompt.error]
        return self._templates.get_template("footer.j2").render(
            injected=[_shown(prompt, room) for prompt in injected],
            variables=request.variables,
            number=request.number,
            of=self._agent.rounds_per_turn,
            time=render_time(request.now),
            check_word=request.check_word,
        )


def order_plugins(plugins: Iterable[PluginBrief]) -> list[PluginBrief]:
    """Return the plugins in the order of the prompt, those that change least first.

    Plugins without injected prompts and those that are always active change least. Names decide the
    rest, so that the order is the same in every process.
    """
    return sorted(plugins, key=lambda p: (p.inject is not None, not p.always_awake, p.module_name, p.key))


def _unrepeated(request: PromptRequest) -> list[HistoryMessage]:
    """Leave out messages that repeat an observation or the answer of a round, which the prompt shows once."""
    everything = [*request.observations, *(o for earlier in request.previous for o in earlier.observations)]
    observed = {observation.call_id for observation in everything if observation.call_id}
    answers = {earlier.round_id for earlier in request.previous if earlier.code is None}
    return [
        message
        for message in without_covered(request.history, request.summary)
        if message.observation_of not in observed and message.answer_of not in answers
    ]


def _answer(earlier: TurnRound, room: PromptRoom) -> str:
    # The model's own text stays as it is, unless it is too long.
    answer = earlier.answer or "(no answer)"
    if len(answer) <= room.limits.answer or room.counter.count(answer) <= room.limits.answer:
        return answer
    return cut_text(answer, room.limits.answer, room.counter)


def _cut_part(part: Part, room: PromptRoom, handle: str | None) -> Part:
    if not isinstance(part, TextPart):
        return part
    return TextPart(text=cut_text(part.text, room.limits.observation, room.counter, handle=handle))


def _shown(prompt: InjectedPrompt, room: PromptRoom) -> dict[str, str]:
    text = cut_text(prompt.text, room.limits.observation, room.counter).strip()
    if prompt.error is not None:
        text = f"[this plugin's context is missing: {neutralise(prompt.error)}]"
    return {"plugin": prompt.plugin, "text": text}
