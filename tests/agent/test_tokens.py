"""Tokens: counted, cut, shared among the parts of a prompt, and learned from refusals."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_prompt import assert_golden, build, noted, request, said, transcript

from broker_config.model_groups import ModelGroup, model_groups
from broker_config.settings import AgentSettings, SandboxSettings, Settings
from nekro.agent.model import Observation, TurnRound
from nekro.agent.prompt import PromptBuilder
from nekro.agent.room import (
    DIRECTORY_VARIABLE,
    ESTIMATE,
    ModelContexts,
    PromptRoom,
    TokenCounter,
    TokenLimits,
    counter_of,
    encoding_of,
    estimate_tokens,
    load_encoder,
)
from nekro.agent.text import cut_text, neutralise
from nekro.sandbox.models import StopType
from nekro_agent.methods import SandboxMethodType

NOON = request().now
WORDS = TokenCounter("words", lambda text: len(text.split()), is_exact=True)


def room(context: int | None = None, **agent: int) -> PromptRoom:
    return PromptRoom(limits=TokenLimits.of(AgentSettings(**agent), context=context))


def earlier(number: int, output: str, **fields: object) -> TurnRound:
    values: dict[str, object] = {
        "number": number, "asked_at": NOON, "answer": f"print({number}); exit(9)", "output": output,
        "stop_type": StopType.MANUAL, "round_id": f"r{number}",
    }  # fmt: skip
    return TurnRound(**(values | fields))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "least", "most"),
    [
        ("", 0, 0),
        ("a", 1, 1),
        # Tokens of o200k_base: 10, 15, 19 and 12; docs/lab/tokens.md states the error for each kind of text.
        ("The quick brown fox jumps over the lazy dog.", 9, 16),
        ("今天天气怎么样？我想去公园散步。", 11, 20),
        ("def total(values):\n    return sum(values)\n", 10, 19),
        ('{"name": "Ada", "born": 1815}', 11, 19),
    ],
)
def test_an_estimate_is_near_the_count_of_a_tokenizer(text: str, least: int, most: int) -> None:
    assert least <= estimate_tokens(text) <= most


@given(st.text(max_size=300), st.text(max_size=300))
def test_an_estimate_grows_with_the_text_and_never_fails(first: str, second: str) -> None:
    assert estimate_tokens(first + "\n" + second) + 3 >= max(estimate_tokens(first), estimate_tokens(second))


@given(st.text(max_size=2_000), st.integers(0, 300), st.sampled_from([ESTIMATE, WORDS]))
def test_a_cut_text_is_short_and_keeps_both_ends(text: str, limit: int, counter: TokenCounter) -> None:
    shown = cut_text(text, limit, counter)
    # The marks that make a text safe, and the note in the gap.
    assert counter.count(shown) <= max(limit, 40) + 40 + text.count("<") + text.count("\x00")
    if "characters hidden" not in shown:
        assert shown == neutralise(text)


def test_a_gap_states_how_much_it_hides_and_how_to_read_it() -> None:
    text = "".join(f"{number} " for number in range(3_000))
    shown = cut_text(text, 200, ESTIMATE, handle="call:c1")
    head, _, rest = shown.partition("\n[… ")
    note, _, tail = rest.partition(" …]\n")
    assert text.startswith(head) and text.endswith(tail)
    hidden = len(text) - len(head) - len(tail)
    assert note == f'{hidden} characters hidden; read_rest("call:c1", {len(head)}) returns them'
    assert "read_rest" not in cut_text(text, 200, ESTIMATE)


def test_limits_follow_the_context_of_the_model() -> None:
    assert TokenLimits.of(AgentSettings(), context=None).prompt == AgentSettings().prompt_tokens
    small = TokenLimits.of(AgentSettings(answer_tokens=1000), context=8000)
    assert (small.prompt, small.history, small.observation, small.catalogue) == (7000, 1750, 875, 2800)
    tiny = TokenLimits.of(AgentSettings(answer_tokens=4096), context=2000)
    assert tiny.prompt == 1000
    assert TokenLimits.of(AgentSettings(), context=8000, longest=3000).prompt == 3000


@pytest.mark.parametrize("context", [2_000, 4_000, 8_000, 64_000])
def test_a_prompt_fits_its_context_whatever_its_parts_hold(context: int) -> None:
    long = "lorem ipsum dolor sit amet " * 4_000
    previous = [
        earlier(
            number,
            long,
            answer=long,
            observations=(Observation(method="s", type=SandboxMethodType.AGENT, text=long, call_id="c"),),
        )
        for number in range(1, 7)
    ]
    given_room = room(context, answer_tokens=500)
    messages = build(
        request(
            history=[said(long, minutes - 40) for minutes in range(40)],
            previous=previous,
            number=7,
            room=given_room,
        )
    )
    fixed = given_room.tokens_of(build(request(room=given_room))[:1])
    assert given_room.tokens_of(messages) <= max(given_room.limits.prompt, fixed + 600)
    assert "Check word, confidential" in messages[-1].text


def test_the_prompt_of_a_small_context_equals_the_golden_file() -> None:
    text = "".join(f"{number} " for number in range(3_000))
    previous = [
        earlier(1, text),
        earlier(
            2,
            "",
            stop_type=StopType.AGENT,
            observations=(
                Observation(method="search", type=SandboxMethodType.AGENT, text=text, call_id="c7"),
                Observation(
                    method="draw",
                    type=SandboxMethodType.MULTIMODAL_AGENT,
                    segments=[{"type": "text", "text": text}, {"type": "text", "text": "short"}],
                    call_id="c8",
                ),
            ),
        ),
    ]
    history = [said(text, -3), noted(text, -2), said("And now?", -1)]
    messages = build(
        request(history=history, previous=previous, number=3, room=room(4_000, answer_tokens=1_000))
    )
    shown = transcript(messages)
    assert_golden("small_context.txt", shown[shown.index("===== user") :])


def test_rounds_that_do_not_fit_are_left_out_from_the_oldest() -> None:
    previous = [earlier(number, "", answer="x = 1\n" * 60) for number in range(1, 40)]
    builder = PromptBuilder(AgentSettings(), SandboxSettings(packages_dir=Path("/nowhere")))
    messages = builder.build(request(previous=previous, number=40, room=room(3_000, answer_tokens=1_000)))
    assert "[the first " in messages[1].text and 'round="39"' in messages[-1].text
    assert not any('round="1"' in message.text for message in messages)


def test_a_tokenizer_is_used_only_with_a_table_that_is_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tiktoken")
    monkeypatch.setattr("socket.getaddrinfo", lambda *_: pytest.fail("a name was looked up"))
    assert (encoding_of("gpt-4o"), encoding_of("openai/gpt-4o-mini")) == ("o200k_base", "o200k_base")
    assert encoding_of("some-model") is None and counter_of("some-model") is ESTIMATE
    monkeypatch.delenv(DIRECTORY_VARIABLE, raising=False)
    assert load_encoder("o200k_base") is None
    monkeypatch.setenv(DIRECTORY_VARIABLE, str(tmp_path))
    assert load_encoder("o200k_base") is None
    (tmp_path / "fb374d419588a4632f3f557e76b4b70aebbca790").write_text("IQ== 0\n")
    assert load_encoder("o200k_base") is None


def test_without_the_extra_every_model_is_estimated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tiktoken.model", None)
    assert encoding_of("gpt-4o") is None and counter_of("gpt-4o") is ESTIMATE


def test_a_counter_keeps_what_it_has_counted() -> None:
    asked: list[str] = []

    def count(text: str) -> int:
        asked.append(text)
        return len(text)

    counter = TokenCounter("letters", count, is_exact=True)
    assert [counter.count("ab"), counter.count("ab"), counter.count("c")] == [2, 2, 1]
    assert asked == ["ab", "c"]


async def test_the_counter_of_a_model_is_looked_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The look-up takes a thread, for which a round would wait."""
    asked: list[str] = []

    def look_up(model: str) -> TokenCounter:
        asked.append(model)
        return ESTIMATE

    monkeypatch.setattr("nekro.agent.room.counter_of", look_up)
    contexts = ModelContexts(AgentSettings(), _find)
    rooms = [await contexts.room("default") for _ in range(3)]
    assert [room.counter for room in rooms] == [ESTIMATE] * 3
    assert len(asked) == 1


@pytest.mark.parametrize(
    ("said_by_endpoint", "longest"),
    [
        ("This model's maximum context length is 4096 tokens.", 3096),
        ("the request exceeds the available context size (n_ctx 2048)", 1048),
        ("too long", 5_000),
        ("prompt is too long: 10000 tokens > 3000 maximum", 2000),
        ("maximum context length is 999999999 tokens", 7_500),
    ],
)
async def test_a_refusal_lowers_the_next_prompt_for_an_hour(said_by_endpoint: str, longest: int) -> None:
    now = 0.0
    contexts = ModelContexts(AgentSettings(answer_tokens=1000), _find, clock=lambda: now)
    before = (await contexts.room("default")).limits.prompt
    contexts.learn("default", tokens=10_000, said=said_by_endpoint)
    assert (await contexts.room("default")).limits.prompt == longest
    assert (await contexts.room("other")).limits.prompt == before
    now = 3_601.0
    assert (await contexts.room("default")).limits.prompt == before


def _find(name: str | None) -> ModelGroup | None:
    return model_groups(Settings(llm={"base_url": "http://127.0.0.1:1", "model": "some"})).get(name or "")
