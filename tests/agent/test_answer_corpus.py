"""Answers of models that were seen outside, and what comes of each."""

from __future__ import annotations

import re

import pytest
from answer_corpus import ANSWERS, NAMES, Case

from nekro.agent.answers.replies import read_reply
from nekro.agent.llm import LLMAnswer
from nekro.agent.verdict import judge_reply

pytestmark = pytest.mark.one_python


def outcome(case: Case) -> tuple[str, str]:
    answer = LLMAnswer(
        text=case.answer,
        model="m",
        prompt_tokens=1,
        answer_tokens=1,
        finish_reason=case.finish_reason,
        tries=1,
        cost=0,
    )
    reply = read_reply(answer, NAMES)
    decided = judge_reply(answer, reply, check_word="cw-0", previous=(), most_bytes=10_000, is_last=False)
    if decided is None:
        assert reply.extracted is not None
        return "program", reply.extracted.code
    if decided.words is not None:
        return "words", decided.words
    assert decided.wants_more and decided.reason
    return "again", ""


@pytest.mark.parametrize("case", ANSWERS, ids=lambda case: case.name)
def test_an_answer_leads_to_what_its_model_meant(case: Case) -> None:
    assert outcome(case) == case.outcome


def test_names_of_cases_are_distinct() -> None:
    assert len({case.name for case in ANSWERS}) == len(ANSWERS)


def test_each_answer_says_where_it_was_seen() -> None:
    form = re.compile(r"(?:[\w.-]+/)?[\w.-]+#\d+|model card of .+|documentation of .+|variant")
    assert [case.name for case in ANSWERS if form.fullmatch(case.source) is None] == []
    assert sum("#" in case.source for case in ANSWERS) >= 170
