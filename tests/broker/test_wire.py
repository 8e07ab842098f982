"""Signed invocations: which are accepted and which are refused."""

from __future__ import annotations

import hashlib
import hmac
import json
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from nekro.wire.invocation import Envelope, Invocation, Signer, new_id, tool_answer
from nekro.wire.values import encode_arguments
from nekro_agent.errors import MessageRefusedError
from nekro_agent.methods import SandboxMethodType

SIGNER = Signer.from_text("key")
NOW = datetime(2026, 5, 1, 12, tzinfo=UTC)


def invocation(**changes: Any) -> Invocation:
    values: dict[str, Any] = {
        "call_id": new_id(),
        "method": "a.b.c",
        "chat_key": "chat",
        "container_key": "sandbox_1",
        "issued_at": NOW,
        "deadline": NOW + timedelta(seconds=30),
        "args": "[[],{}]",
    }
    return Invocation(**values | changes)


_timezones = st.just(UTC) | st.timedeltas(timedelta(hours=-14), timedelta(hours=14)).map(
    lambda offset: timezone(timedelta(minutes=offset // timedelta(minutes=1)))
)


def sent(body: dict[str, Any]) -> dict[str, Any]:
    """The body as the receiver decodes it from JSON."""
    return json.loads(json.dumps(body))


@given(chat_key=st.text(), user_id=st.none() | st.text())
def test_a_signed_invocation_is_read_back_equal(chat_key: str, user_id: str | None) -> None:
    original = invocation(chat_key=chat_key, user_id=user_id)
    assert SIGNER.verify(sent(SIGNER.sign(original)), task_name="a.b.c") == original


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("chat_key", "other"),
        ("user_id", "root"),
        ("method", "a.b.d"),
        ("deadline", "2030-01-01T00:00:00Z"),
        ("args", ""),
    ],
)
def test_an_altered_field_breaks_the_signature(field: str, value: str) -> None:
    body = sent(SIGNER.sign(invocation()))
    body["invocation"][field] = value
    with pytest.raises(MessageRefusedError, match="signature"):
        SIGNER.verify(body)


def test_a_signature_of_another_key_is_refused_and_the_setting_named() -> None:
    with pytest.raises(MessageRefusedError, match="SIGNING_KEY"):
        Signer.from_text("other").verify(sent(SIGNER.sign(invocation())))


@pytest.mark.parametrize(
    "body",
    [
        None,
        [],
        "text",
        {},
        {"invocation": {}},
        {"signature": "00"},
        {"invocation": [], "signature": "00"},
        {"invocation": {}, "signature": 7},
    ],
)
def test_a_malformed_body_is_refused(body: object) -> None:
    with pytest.raises(MessageRefusedError):
        SIGNER.verify(body)


def test_a_message_signed_for_one_task_is_refused_by_another() -> None:
    with pytest.raises(MessageRefusedError, match=r"signed for a\.b\.c, sent to a\.b\.other"):
        SIGNER.verify(sent(SIGNER.sign(invocation())), task_name="a.b.other")


def resigned(payload: dict[str, Any]) -> dict[str, Any]:
    """Sign a payload that no ``Invocation`` can hold, as a worker of another version would."""
    return {"invocation": payload, "signature": SIGNER._digest(payload)}


@pytest.mark.parametrize(
    ("version", "hint"),
    [(3, "upgrade this worker"), (1, "upgrade its sender"), (None, "sender"), (True, "sender")],
)
def test_another_version_is_refused_and_the_side_to_upgrade_named(version: object, hint: str) -> None:
    payload = sent(SIGNER.sign(invocation()))["invocation"] | {"version": version}
    with pytest.raises(MessageRefusedError, match=rf"version {version!r}, .+ supports 2; .*{hint}"):
        SIGNER.verify(resigned(payload))


def test_unknown_fields_of_a_newer_peer_are_ignored() -> None:
    original = invocation()
    payload = sent(SIGNER.sign(original))["invocation"]
    assert SIGNER.verify(resigned(payload | {"surprise": {"deep": [1]}})) == original
    altered = resigned(payload | {"surprise": 1})
    altered["invocation"]["surprise"] = 2
    with pytest.raises(MessageRefusedError, match="signature"):
        SIGNER.verify(altered)


def test_fields_missing_from_an_older_peer_get_their_defaults() -> None:
    original = invocation()
    payload = sent(SIGNER.sign(original))["invocation"]
    for name, field in Invocation.model_fields.items():
        if not field.is_required() and name != "version":
            del payload[name]
    assert SIGNER.verify(resigned(payload)) == original


def test_a_missing_field_is_refused_by_name() -> None:
    payload = sent(SIGNER.sign(invocation()))["invocation"]
    del payload["chat_key"]
    with pytest.raises(MessageRefusedError, match="chat_key"):
        SIGNER.verify(resigned(payload))


def test_arguments_are_transferred_as_encoded() -> None:
    text = encode_arguments(("é\u2028\x7f\U0001f600", b"\xff", float("nan")), {"$name": (1,)})
    body = sent(SIGNER.sign(invocation(args=text)))
    assert body["invocation"]["args"] == text == SIGNER.verify(body).args


def test_an_envelope_carries_a_text_through_json() -> None:
    envelope = Envelope.of(
        call_id="1", type=SandboxMethodType.TOOL, value=b'{"$tuple":[1]}', started_at=NOW, finished_at=NOW
    )
    again = Envelope.model_validate(json.loads(envelope.model_dump_json()))
    assert again == envelope and again.value_bytes() == b'{"$tuple":[1]}'


@given(
    value=st.text(st.characters(exclude_categories=["Cs"])).map(str.encode),
    started_at=st.datetimes(timezones=_timezones),
    finished_at=st.datetimes(timezones=_timezones),
)
def test_the_answer_of_a_tool_is_the_data_of_its_envelope(
    value: bytes, started_at: datetime, finished_at: datetime
) -> None:
    said = {
        "call_id": "1",
        "value": value,
        "worker": "w",
        "started_at": started_at,
        "finished_at": finished_at,
    }
    envelope = Envelope.of(type=SandboxMethodType.TOOL, **said)
    assert tool_answer(**said) == envelope.model_dump(mode="json")


_texts = st.text(st.characters())
_flat = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | _texts
_payloads = st.dictionaries(_texts, _flat | st.dictionaries(_texts, _texts) | st.lists(_flat))


@pytest.mark.extended
@given(_payloads)
@example({"a": "\x7f"})
@example({"a": "ü"})
def test_signatures_cover_sorted_ascii_json_of_any_encoder(payload: dict[str, Any]) -> None:
    """Workers of another release compute them with ``json``."""
    canonical = json.dumps(payload, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    assert SIGNER._digest(payload) == hmac.new(b"key", canonical.encode(), hashlib.sha256).hexdigest()
