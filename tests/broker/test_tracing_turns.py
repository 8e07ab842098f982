"""Ids, sampling and contents of spans, and the names of the conventions."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from uuid import uuid4

import pytest
from pydantic import ValidationError
from recorded_spans import recorded_spans

from broker_config.settings import TracingSettings
from nekro.base.redaction import Redactor
from nekro.broker import tracing
from nekro.broker.tracing import TurnTrace, genai
from nekro.broker.tracing.genai import content_text

pytestmark = pytest.mark.usefixtures("no_exporter")

WHEN = datetime(2026, 1, 2, tzinfo=UTC)


def turn_of(turn_id: str = "t1", root: str | None = None) -> TurnTrace:
    return TurnTrace(turn_id=turn_id, root_turn_id=root or turn_id)


def end(turn: TurnTrace, error_type: str | None = None) -> None:
    tracing.end_turn(
        turn,
        started_at=WHEN,
        ended_at=WHEN + timedelta(seconds=2),
        ids={"turn_id": turn.turn_id},
        standard={genai.OPERATION: genai.INVOKE_AGENT},
        error_type=error_type,
    )


def test_every_name_is_one_of_the_conventions() -> None:
    from opentelemetry.semconv._incubating.attributes import gen_ai_attributes as published

    known = {value for name, value in vars(published).items() if name.startswith("GEN_AI_")}
    operations = {item.value for item in published.GenAiOperationNameValues}
    ours = {
        value
        for name, value in vars(genai).items()
        if name.isupper() and name[0] != "_" and isinstance(value, str)
    }
    assert {name for name in ours if name.startswith("gen_ai.")} <= known
    assert ours - known == {"nekro"} | (ours & operations)


def test_the_span_of_a_turn_ends_after_its_children_and_is_their_parent() -> None:
    turn = turn_of()
    with recorded_spans() as spans:
        with tracing.span("round", {}, turn=turn):
            pass
        end(turn, "turn_limit")
    child, whole = spans
    assert whole.context.trace_id == turn.trace_id == child.context.trace_id
    assert child.parent.span_id == whole.context.span_id == turn.span_id and whole.parent is None
    assert whole.end_time - whole.start_time == 2_000_000_000
    assert not whole.status.is_ok and whole.attributes["error.type"] == "turn_limit"
    # The next spans have ids of their own again.
    assert child.context.span_id != turn.span_id


def test_a_turn_that_another_one_caused_is_below_it_in_the_same_trace() -> None:
    root, later = turn_of("t1"), turn_of("t2", "t1")
    with recorded_spans() as spans:
        end(later)
    assert spans[0].context.trace_id == root.trace_id
    assert (spans[0].context.span_id, spans[0].parent.span_id) == (later.span_id, root.span_id)


def test_a_ratio_samples_that_share_of_turns_and_all_spans_of_a_turn_alike(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_traceidratio")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", "0.25")
    turns = [turn_of(uuid4().hex) for _ in range(2000)]
    with recorded_spans() as spans:
        for turn in turns:
            with tracing.span("round", {}, turn=turn), tracing.span("chat", {}):
                pass
            end(turn)
        sampled = [turn for turn in turns if tracing.recorded_trace_id(turn) is not None]
    assert 380 < len(sampled) < 620  # 500; six standard deviations are 116
    assert len(spans) == 3 * len(sampled)
    assert {span.context.trace_id for span in spans} == {turn.trace_id for turn in sampled}


def test_an_unsampled_turn_makes_no_spans_and_its_messages_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_always_off")
    with recorded_spans() as spans:
        assert tracing.recorded_trace_id(turn_of()) is None
        with tracing.span("round", {}, turn=turn_of()):
            assert tracing.span("a", {}) is tracing.span("b", {})
            sent = tracing.trace_headers()
        with tracing.span("run", {}, kind="consumer", headers=sent), tracing.span("inner", {}):
            assert tracing.trace_headers() == sent
        end(turn_of())
    assert sent["traceparent"] == f"00-{turn_of().trace_id:032x}-{turn_of().span_id:016x}-00"
    assert spans == []


def test_a_request_and_the_turn_that_it_begins_are_linked() -> None:
    with recorded_spans() as spans:
        with tracing.span("http.request", {}, kind="server", headers={}):
            tracing.begin_turn(turn_of())
        tracing.begin_turn(turn_of())  # without a current span: nothing
    begun, request = spans
    assert [link.context.span_id for link in request.links] == [turn_of().span_id]
    assert [link.context.span_id for link in begun.links] == [request.context.span_id]
    assert begun.context.trace_id == turn_of().trace_id and begun.parent.span_id == turn_of().span_id


@pytest.mark.parametrize(
    ("setting", "variable", "redact", "expected"),
    [
        (False, None, str, False),
        (True, None, str, True),
        (True, None, None, False),  # a process that cannot remove secrets records no texts
        (False, "true", str, True),
        (False, "SPAN_AND_EVENT", str, True),
        (False, "EVENT_ONLY", str, False),
        (False, "false", str, False),
    ],
)
def test_contents_are_recorded_only_when_that_is_switched_on(
    setting: bool,
    variable: str | None,
    redact: Callable[[str], str] | None,
    expected: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if variable is not None:
        monkeypatch.setenv("OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT", variable)
    made = []
    with (
        recorded_spans(capture_content=setting, redact=redact) as spans,
        tracing.span("chat", {}) as part,
    ):
        part.content("text", lambda: made.append(1) or ["words"])
    assert (spans[0].attributes.get("text") == '["words"]') is expected
    assert bool(made) is expected


def test_secrets_are_removed_from_contents_however_json_writes_them() -> None:
    secret = 'pass"wörd\n\\1'
    text = content_text({f"key {secret}": ["a", {"b": f"<{secret}>", "n": 1}]}, Redactor([secret]))
    assert text is not None and json.loads(text) == {"key [secret]": ["a", {"b": "<[secret]>", "n": 1}]}


def test_a_secret_where_a_text_is_cut_is_removed_first() -> None:
    secret = "s" * 64
    text = content_text(["x" * 31_980 + secret], Redactor([secret]))
    assert text is not None and "sss" not in text and "[secret]" in text


@pytest.mark.parametrize("content", [["x" * 500_000], ["y" * 1000] * 5000, ["\ud800"], {"a": float("inf")}])
def test_long_contents_are_short_valid_json(content: object) -> None:
    text = content_text(content, str)
    assert text is None or (len(text) <= 100_000 and json.loads(text) is not None)
    if text is not None:
        text.encode()


def test_content_that_is_no_json_is_left_out() -> None:
    deep: list[object] = []
    for _ in range(100_000):
        deep = [deep]
    assert content_text([object()], str) is None and content_text(deep, str) is None


@pytest.mark.parametrize("value", ["https://x.example/t", "ftp://x/{trace_id}", "javascript:{trace_id}"])
def test_a_url_template_needs_http_and_a_place_for_the_id(value: str) -> None:
    with pytest.raises(ValidationError, match="trace_id"):
        TracingSettings(url_template=value)


def test_a_url_template_is_filled() -> None:
    assert TracingSettings(url_template="http://h/{trace_id}?a={b}").url_of("ab") == "http://h/ab?a={b}"
    assert TracingSettings().url_of("ab") is None
