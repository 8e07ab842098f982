"""Another writer on the broker adds entries to the list of dead letters, or alters existing ones."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from broker_config.app import NekroApp
from broker_config.keys import Keys
from broker_config.settings import Settings
from broker_config.topology import DRAIN_TASK
from nekro.broker.celery.tasks import admit
from nekro.broker.dead_letters import DeadLetters, DeadMessage
from nekro.broker.delivery.messages import CallMessage
from nekro.broker.delivery.transport import DELIVERIES_HEADER
from nekro.broker.publishing import encode_message
from nekro.wire.invocation import Invocation, Signer, new_id
from nekro_agent.errors import MessageRefusedError, NotFoundError, UsageError

SIGNER = Signer.from_text("test-signing-key")


@pytest.fixture
def letters(app: NekroApp) -> Iterator[DeadLetters]:
    letters = DeadLetters(app, signer=SIGNER)
    yield letters
    letters.close()


@pytest.fixture
def add_dead_letter(client: Any, settings: Settings, letters: DeadLetters) -> Callable[..., DeadMessage]:
    def put(message: dict[str, Any]) -> DeadMessage:
        client.delete(Keys(prefix=settings.broker.key_prefix).dead)
        client.lpush(Keys(prefix=settings.broker.key_prefix).dead, json.dumps(message))
        (found,) = letters.newest(limit=5)
        return found

    return put


def a_call(app: NekroApp, *, seconds: float = 60, key: str = "test-signing-key") -> dict[str, Any]:
    """A signed call as a worker stores it among the dead letters."""
    now = datetime.now(UTC)
    invocation = Invocation(
        call_id=new_id(),
        method="a.b.c",
        chat_key="chat",
        container_key="box",
        user_id="u",
        issued_at=now,
        deadline=now + timedelta(seconds=seconds),
        args="",
    )
    call = CallMessage.of(invocation, signer=Signer.from_text(key), lane="methods", reply_to=new_id())
    message: dict[str, Any] = json.loads(encode_message(call.build(app), queue="methods"))
    message["headers"][DELIVERIES_HEADER] = 3
    return message


def changed_body(message: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """A copy whose invocation has other fields but the same signature."""
    body = json.loads(message["body"])
    body[0][0]["invocation"].update(fields)
    return {**message, "body": json.dumps(body)}


def alterations(app: NekroApp) -> Iterator[tuple[str, dict[str, Any]]]:
    """Entries that must not run, each with its fault."""
    call = a_call(app)
    yield "another user", changed_body(call, user_id="admin")
    yield "another chat", changed_body(call, chat_key="victim")
    yield "other arguments", changed_body(call, args="AAAA")
    yield "a later deadline", changed_body(call, deadline="2999-01-01T00:00:00Z")
    yield "another id", {**call, "headers": {**call["headers"], "id": new_id()}}
    yield "another task", {**call, "headers": {**call["headers"], "task": "a.b.d"}}
    yield (
        "another queue",
        {
            **call,
            "properties": {**call["properties"], "delivery_info": {"exchange": "", "routing_key": "long"}},
        },
    )
    yield "other time limits", {**call, "headers": {**call["headers"], "timelimit": [1e9, 1e9]}}
    body = json.loads(call["body"])
    yield "a callback", {**call, "body": json.dumps([body[0], {}, {"callbacks": [{"task": "a.b.c"}]}])}
    yield "pickle", {**call, "content-type": "application/x-python-serialize"}
    yield "compressed", {**call, "headers": {**call["headers"], "compression": "zlib"}}
    headers = {name: value for name, value in call["headers"].items() if name != "x-nekro-signature"}
    yield "the signature of its body alone", {**call, "headers": headers}
    yield "another key", a_call(app, key="another-key")
    other = a_call(app)
    yield "the body of another call", {**call, "body": other["body"]}
    yield "no body", {**call, "body": None}
    yield "a round of a writer's", {
        **call, "headers": {**headers, "task": DRAIN_TASK}, "body": json.dumps([["victim"], {}, {}])
    }  # fmt: skip


def test_an_altered_entry_is_not_sent_again(
    app: NekroApp,
    letters: DeadLetters,
    client: Any,
    settings: Settings,
    add_dead_letter: Callable[..., DeadMessage],
) -> None:
    prefix = settings.broker.key_prefix
    for name, message in alterations(app):
        dead = add_dead_letter(message)
        with pytest.raises(MessageRefusedError, match=r"cannot be sent again.*nekro dead drop"):
            letters.verify(dead)
        assert client.llen(f"{prefix}dead") == 1, name
    assert not client.exists(f"{prefix}methods", f"{prefix}long", f"{prefix}rounds")


def queued(client: Any, settings: Settings) -> Any:
    """The only message of queue ``methods``, as its consumer receives it."""
    (raw,) = client.lrange(f"{settings.broker.key_prefix}methods", 0, -1)
    message = json.loads(raw)
    return SimpleNamespace(
        headers=message["headers"],
        properties=message["properties"],
        delivery_info={"exchange": "", "routing_key": "methods"},
        content_type=message["content-type"],
        content_encoding=message["content-encoding"],
        payload=json.loads(message["body"]),
    )


def test_a_call_within_its_deadline_is_sent_again_with_its_signature(
    app: NekroApp,
    letters: DeadLetters,
    client: Any,
    settings: Settings,
    add_dead_letter: Callable[..., DeadMessage],
) -> None:
    message = a_call(app)
    letters.retry(letters.verify(add_dead_letter(message)), timeout_seconds=None)
    again = queued(client, settings)
    admit(again, app.task_seal)
    assert again.payload[0] == json.loads(message["body"])[0]
    assert DELIVERIES_HEADER not in again.headers
    assert again.properties["reply_to"] is None
    assert letters.newest(limit=5) == []


def test_a_message_that_two_operators_retry_is_sent_once(
    app: NekroApp,
    letters: DeadLetters,
    client: Any,
    settings: Settings,
    add_dead_letter: Callable[..., DeadMessage],
) -> None:
    verified = letters.verify(add_dead_letter(a_call(app)))
    letters.retry(verified, timeout_seconds=None)
    for timeout_seconds in (None, 30):
        with pytest.raises(NotFoundError, match=f"{verified.message.id} was sent again or dropped meanwhile"):
            letters.retry(verified, timeout_seconds=timeout_seconds)
    assert client.llen(f"{settings.broker.key_prefix}methods") == 1


def test_a_call_past_its_deadline_requires_a_new_one(
    app: NekroApp,
    letters: DeadLetters,
    client: Any,
    settings: Settings,
    add_dead_letter: Callable[..., DeadMessage],
) -> None:
    verified = letters.verify(add_dead_letter(a_call(app, seconds=-1)))
    with pytest.raises(UsageError, match="--timeout SECONDS"):
        letters.retry(verified, timeout_seconds=None)
    assert not client.exists(f"{settings.broker.key_prefix}methods")
    letters.retry(verified, timeout_seconds=30)
    again = queued(client, settings)
    admit(again, app.task_seal)
    invocation = SIGNER.verify(again.payload[0][0], task_name="a.b.c")
    assert 25 < invocation.remaining_seconds() <= 30
    assert (invocation.call_id, invocation.chat_key) == (verified.message.id, "chat")


def test_a_refused_message_is_shown_and_cannot_be_sent_again(
    letters: DeadLetters, client: Any, settings: Settings, app: NekroApp
) -> None:
    refused = Keys(prefix=settings.broker.key_prefix).refused
    good = {"reason": "message refused: it is not signed", "bytes": 10, "message": json.dumps(a_call(app))}
    entries = [json.dumps(good), "garbage", "[]", json.dumps({"reason": {}, "bytes": "x", "message": None})]
    for entry in entries:
        client.lpush(refused, entry)
    found = letters.newest(limit=10)
    assert len(found) == len(entries) and all("refused" in message.reason for message in found)
    assert {message.task for message in found} == {"a.b.c", None}
    for message in found:
        with pytest.raises(MessageRefusedError, match="cannot be sent again"):
            letters.verify(message)
        assert letters.drop(message)
    assert not client.exists(refused)
