"""Decides on an answer before anything of it runs or is sent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from nekro.agent import verdict
from nekro.agent.answers.extraction import ExtractedCode
from nekro.agent.answers.replies import Reply, ReplyKind
from nekro.agent.check_words import reveals_check_word
from nekro.agent.llm import LLMAnswer
from nekro.agent.loops import MOST_REPEATS, repeats_of_code
from nekro.agent.model import TurnRound
from nekro.agent.verdict import Verdict

__all__ = ["judge_reply"]

#: Longest program: far more than a model intends to write, and below the sandbox's limit of a mebibyte.
_MOST_CODE_CHARS: Final = 200_000


def judge_reply(
    answer: LLMAnswer,
    reply: Reply,
    *,
    check_word: str,
    previous: Sequence[TurnRound],
    most_bytes: int,
    is_last: bool,
) -> Verdict | None:
    """Decide on an answer; None if its program is to run.

    Args:
        check_word: that of the answer's prompt.
        previous: earlier rounds of the turn.
        most_bytes: longest message, in UTF-8.
        is_last: whether the model is not asked again in this turn.
    """
    if reply.extracted is not None:
        return _judge_program(answer, reply.extracted, check_word, previous)
    if reply.kind is ReplyKind.TOOL_CALL:
        return verdict.tool_called(answer.tool_calls)
    if reply.kind is ReplyKind.MIXED:
        return verdict.program_mixed()
    if reply.kind is ReplyKind.NOTHING:
        return verdict.answer_cut(answer.finish_reason) if answer.was_cut else verdict.empty_answer()
    if reveals_check_word(check_word, reply.words):
        return verdict.word_said()
    if len(reply.words.encode("utf-8", "surrogatepass")) > most_bytes:
        return verdict.words_too_long(most_bytes)
    if answer.was_cut:
        return verdict.words_cut(reply.words, answer.finish_reason, is_last=is_last)
    return verdict.said(reply.words)


def _judge_program(
    answer: LLMAnswer, program: ExtractedCode, check_word: str, previous: Sequence[TurnRound]
) -> Verdict | None:
    if reveals_check_word(check_word, program.code):
        return verdict.word_revealed()
    if answer.was_cut and not (program.fenced and program.closed):
        return verdict.answer_cut(answer.finish_reason)
    if not program.closed:
        return verdict.program_open()
    if len(program.code) > _MOST_CODE_CHARS:
        return verdict.program_too_long(_MOST_CODE_CHARS)
    if not program.is_empty:
        is_loop = repeats_of_code(program.code, previous) + 1 >= MOST_REPEATS
        return verdict.program_repeated() if is_loop else None
    is_meant = program.fenced or program.code
    return verdict.nothing_to_do() if is_meant else verdict.answer_without_program()
