"""Requests of both clients to servers that fail."""

from __future__ import annotations

import asyncio
import inspect
import json
import ssl
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import httpx
import pytest
from scripted_server import cut, json_answer, partial, problem, scripted, stream
from waiting import WAIT_SECONDS

import nekro_client
from nekro_client import (
    ApiError,
    AsyncClient,
    AuthenticationError,
    Client,
    ClientError,
    ConflictError,
    InvalidAnswerError,
    InvalidRequestError,
    MethodFailedError,
    NotFoundError,
    RateLimitedError,
    UnavailableError,
    UnreachableError,
    WaitTimeoutError,
)
from nekro_client.chats import Chat
from nekro_client.models import Event, Problem, Turn
from nekro_client.operations import tls_of

POSTED = '{"message": null, "turn_id": "t1", "field_of_a_newer_release": 1}'
Use = Callable[[Any], Any]
#: Of the clients here.
RETRY_SECONDS = WAIT_SECONDS


async def _finished(use: Use, client: AsyncClient) -> Any:
    async with client:
        value = use(client)
        return await value if inspect.isawaitable(value) else value


def _sync(url: str, use: Use) -> Any:
    with Client(url, "nk_a_b", retry_seconds=RETRY_SECONDS) as client:
        return use(client)


def _async(url: str, use: Use) -> Any:
    return asyncio.run(_finished(use, AsyncClient(url, "nk_a_b", retry_seconds=RETRY_SECONDS)))


@pytest.fixture(params=[_sync, _async], ids=["sync", "async"])
def run(request: pytest.FixtureRequest) -> Callable[[str, Use], Any]:
    """Use a client of each kind."""
    return request.param  # type: ignore[no-any-return]


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pauses between attempts take no time."""
    from nekro_client import operations

    monkeypatch.setattr(operations, "_FIRST_DELAY_SECONDS", 0.001)
    monkeypatch.setattr(operations, "_LONGEST_DELAY_SECONDS", 0.01)


@pytest.mark.parametrize(
    "failure",
    [
        cut,
        problem(503, "overloaded"),
        problem(429, "rate_limited", Retry_After="0"),
        problem(409, "idempotent_request_running", Retry_After="0"),
        json_answer("<html>bad gateway</html>", status=502),
    ],
    ids=["cut", "503", "429", "in_progress", "proxy"],
)
def test_a_post_that_fails_in_passing_is_repeated_with_its_idempotency_key(run: Any, failure: Any) -> None:
    with scripted(failure, failure, json_answer(POSTED, status=202)) as server:
        posted = run(server.url, lambda client: client.chat("web 1/ä").send("hello", user_id="ada"))
    assert posted.turn_id == "t1"
    assert len(server.requests) == 3
    assert len({request.headers["idempotency-key"] for request in server.requests}) == 1
    assert len({request.body for request in server.requests}) == 1
    first = server.requests[0]
    assert first.path == "/api/v1/chats/web%201%2F%C3%A4/messages"
    assert first.headers["authorization"] == "Bearer nk_a_b"
    assert json.loads(first.body) == {"text": "hello", "parts": [], "user_id": "ada", "to_agent": True}


def test_two_messages_have_different_idempotency_keys_unless_one_is_given(run: Any) -> None:
    def use(client: Any) -> Any:
        if isinstance(client, Client):
            return [client.chat("c").send("x") for _ in range(2)], client.chat("c").send(
                "x", idempotency_key="mine"
            )

        async def send() -> None:
            await client.chat("c").send("x")
            await client.chat("c").send("x")
            await client.chat("c").send("x", idempotency_key="mine")

        return send()

    with scripted(json_answer(POSTED, status=202)) as server:
        run(server.url, use)
    keys = [request.headers["idempotency-key"] for request in server.requests]
    assert len(set(keys)) == 3 and keys[2] == "mine"


@pytest.mark.parametrize(
    ("status", "code", "kind"),
    [
        (401, "key_invalid", AuthenticationError),
        (404, "not_found", NotFoundError),
        (409, "conflict", ConflictError),
        (500, "internal", ApiError),
        (422, "method_failed", MethodFailedError),
        (422, "argument", InvalidRequestError),
        (502, "outcome_unknown", UnavailableError),
        (504, "call_timeout", UnavailableError),
    ],
)
def test_an_error_that_stays_is_raised_at_once(
    run: Any, status: int, code: str, kind: type[ApiError]
) -> None:
    with scripted(problem(status, code)) as server, pytest.raises(kind) as caught:
        run(server.url, lambda client: client.turns.get("t1"))
    assert (caught.value.status, caught.value.code, caught.value.request_id) == (status, code, "r1")
    assert len(server.requests) == 1


def test_retries_end_with_an_unreachable_error(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "RETRY_SECONDS", 2.0)
    with scripted(cut) as server, pytest.raises(UnreachableError, match="/api/v1/methods"):
        run(server.url, lambda client: client.methods())
    assert len(server.requests) > 1


def test_a_long_retry_after_is_raised_without_a_retry(run: Any) -> None:
    answer = problem(429, "budget_spent", Retry_After="3600")
    with scripted(answer) as server, pytest.raises(RateLimitedError) as caught:
        run(server.url, lambda client: client.methods())
    assert caught.value.retry_after_seconds == 3600
    assert len(server.requests) == 1


def test_an_invalid_response_is_reported(run: Any) -> None:
    with scripted(json_answer('{"id": 1}')) as server, pytest.raises(InvalidAnswerError, match="/turns/t1"):
        run(server.url, lambda client: client.turns.get("t1"))


def test_all_pages_of_a_list_are_read(run: Any) -> None:
    names = ("name", "task", "plugin", "type", "lane", "signature")
    method = json.dumps(dict.fromkeys(names, "x"))
    pages = [
        f'{{"items": [{method}], "next_cursor": "x&y"}}',
        f'{{"items": [{method}], "next_cursor": null}}',
    ]
    with scripted(*map(json_answer, pages)) as server:
        assert len(run(server.url, lambda client: client.methods())) == 2
    assert [request.path for request in server.requests] == [
        "/api/v1/methods",
        "/api/v1/methods?cursor=x%26y",
    ]


def turn(state: str, *waits_for: str) -> Any:
    cause = '{"kind": "message", "id": "m"}'
    at = "2026-01-01T00:00:00Z"
    waits = json.dumps(waits_for)
    return json_answer(
        f'{{"id": "t", "chat_key": "c", "state": "{state}", "cause": {cause}, "requested_at": "{at}", '
        f'"waits_for": {waits}}}'
    )


def test_a_turn_is_awaited_by_the_events_of_its_chat(run: Any) -> None:
    position = stream("id: 4\nretry: 1000\n\n")
    answers = [
        turn("waiting"),
        position,
        turn("running"),
        stream(event(5, "turn.ended", turn_id="other"), ends_well=False),
        stream(event(6, "turn.ended", turn_id="t")),
        turn("failed"),
    ]
    with scripted(*answers) as server:
        ended: Turn = run(server.url, lambda client: client.turns.wait("t"))
    assert ended.state == "failed"
    events, ends = "/api/v1/chats/c/events?live=false", "&types=turn.ended&after="
    assert [request.path for request in server.requests] == [
        "/api/v1/turns/t",
        events,
        "/api/v1/turns/t",
        f"{events}{ends}4",
        f"{events}{ends}5",
        "/api/v1/turns/t",
    ]


def test_the_wait_for_a_turn_ends_when_it_waits_for_a_person(run: Any) -> None:
    with scripted(turn("running"), stream("id: 4\n\n"), turn("waiting", "a1")) as server:
        waiting: Turn = run(server.url, lambda client: client.turns.wait("t"))
    assert (waiting.state, waiting.waits_for) == ("waiting", ["a1"])
    assert len(server.requests) == 3


def test_a_turn_that_ends_before_its_events_are_read_is_not_missed(run: Any) -> None:
    with scripted(turn("running"), stream("id: 4\n\n"), turn("done")) as server:
        assert run(server.url, lambda client: client.turns.wait("t")).state == "done"
    assert len(server.requests) == 3


def test_the_wait_for_a_turn_ends_with_its_time(run: Any) -> None:
    def silent(handler: Any) -> None:
        stream(event(5, "turn.ended", turn_id="other"), ends_well=False)(handler)
        handler.rfile.read(1)  # until the client leaves

    answers = [turn("running"), stream("id: 4\n\n"), turn("running"), silent, turn("running")]
    with scripted(*answers) as server, pytest.raises(WaitTimeoutError, match="running after 2 s"):
        run(server.url, lambda client: client.turns.wait("t", timeout_seconds=2))
    assert len(server.requests) == 5


# Texts that are not Unicode


def test_lone_surrogates_are_sent_and_received(run: Any) -> None:
    message = {
        "id": "m", "sequence": 1, "chat_key": "c", "kind": "assistant", "text": "half \ud83d",
        "created_at": "2026-01-01T00:00:00Z",
    }  # fmt: skip
    posted = json_answer(json.dumps({"message": message, "turn_id": "t"}), status=202)
    with scripted(posted) as server:
        got = run(server.url, lambda client: client.chat("c").send("half \ud83d"))
    assert got.message.text == "half \ud83d"
    assert json.loads(server.requests[0].body)["text"] == "half \ud83d"


def test_an_event_with_a_lone_surrogate_does_not_end_its_stream(run: Any) -> None:
    half = event(4, data={"text": "half"}).replace("half", "half \\ud83d")
    with scripted(stream(half, event(5))) as server:
        events = run(server.url, read(2, after=3))
    assert [(e.number, e.data.get("text")) for e in events] == [(4, "half \ud83d"), (5, None)]


# Event streams


def event(number: int | None, kind: str = "message.sent", **fields: Any) -> str:
    at: Any = "2026-01-01T00:00:00Z"
    body = Event(number=number, type=kind, chat_key="c", at=at, **fields)
    named = "" if number is None else f"id: {number}\n"
    return f"{named}event: {kind}\ndata: {body.model_dump_json()}\n\n"


def read(count: int, **options: Any) -> Use:
    """Read so many events."""

    def use(client: Any) -> Any:
        events = client.chat("c").events(**options)
        if isinstance(client, Client):
            with events:
                return [next(events) for _ in range(count)]

        async def gather() -> list[Event]:
            async with events:
                return [await anext(events) for _ in range(count)]

        return gather()

    return use


def test_a_stream_goes_on_after_cuts_without_gap_or_repetition(run: Any) -> None:
    answers = [
        stream(event(4), event(5)[:-9], ends_well=False),
        cut,
        problem(503, "overloaded", Retry_After="0"),
        json_answer("starting", status=502),
        stream(": comment\n\n", event(4), event(5), event(None, "model.delta"), event(6)),
        stream(event(6), event(7)),
    ]
    with scripted(*answers) as server:
        events = run(server.url, read(5, after=3))
    assert [e.number for e in events] == [4, 5, None, 6, 7]
    assert [request.path.partition("?")[2] for request in server.requests] == [
        "after=3",
        *["after=4"] * 4,
        "after=6",
    ]


def test_a_stream_from_now_on_keeps_its_position_before_the_first_event(run: Any) -> None:
    with scripted(stream("id: 8\n\n", ends_well=False), stream(event(9))) as server:
        events = run(server.url, read(1))
    assert [e.number for e in events] == [9]
    assert [request.path.partition("?")[2] for request in server.requests] == ["", "after=8"]


def test_a_stream_reads_again_what_the_database_has_lost(run: Any) -> None:
    lost = Event(type="events.lost", chat_key="c", at="2026-01-01T00:00:00Z", data={"after": 2})  # type: ignore[arg-type]
    answers = [
        stream("id: 3.0000000a\n\n", event(4).replace("id: 4", "id: 4.0000000b"), ends_well=False),
        stream(f"id: 2\nevent: events.lost\ndata: {lost.model_dump_json()}\n\n"),
        stream(event(3), event(4)),
    ]
    with scripted(*answers) as server:
        events = run(server.url, read(4, after=3))
    assert [(e.type, e.number) for e in events] == [
        ("message.sent", 4),
        ("events.lost", None),
        ("message.sent", 3),
        ("message.sent", 4),
    ]
    sent = [(r.path.partition("?")[2], r.headers.get("last-event-id")) for r in server.requests]
    assert sent == [("after=3", None), ("after=4", "4.0000000b"), ("after=2", None)]


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (problem(401, "key_invalid"), AuthenticationError),
        (json_answer("{}"), InvalidAnswerError),
        (stream("data: no event\n\n"), InvalidAnswerError),
    ],
)
def test_a_stream_that_cannot_work_ends_at_once(run: Any, answer: Any, kind: type[ClientError]) -> None:
    with scripted(answer) as server, pytest.raises(kind):
        run(server.url, read(1, after=0))
    assert len(server.requests) == 1


def test_a_stream_gives_up_after_the_stated_time(run: Any) -> None:
    with scripted(cut) as server, pytest.raises(UnreachableError):
        run(server.url, read(1, after=0, give_up_seconds=0))


# Runs


def test_output_with_a_lone_surrogate_is_passed_on(run: Any) -> None:
    piece = chunk(0, "half").replace("half", "half \\ud83d")
    with scripted(stream(piece, ended("half \ud83d and more"))) as server:
        got, report = run(server.url, pieces)
    assert ("".join(got), report.output) == ("half \ud83d and more",) * 2


def chunk(offset: int, text: str) -> str:
    return event(None, "output.chunk", call_id="r", data={"offset": offset, "text": text})


def ended(output: str) -> str:
    report = {"id": "r", "stop_type": "NORMAL", "exit_code": 0, "output": output}
    return f"event: run.ended\ndata: {json.dumps(report)}\n\n"


def pieces(client: Any) -> Any:
    """Run code; returns the pieces of its output, and the report."""
    running = client.stream_run("code", chat_key="c")
    if isinstance(client, Client):
        with running:
            return list(running), running.result()

    async def gather() -> Any:
        async with running:
            return [piece async for piece in running], await running.result()

    return gather()


@pytest.mark.parametrize(
    ("sent", "received"),
    [
        ([chunk(0, "a\n"), chunk(2, "b\n"), ended("a\nb\n")], ["a\n", "b\n"]),
        ([chunk(0, "a\n"), ended("a\nb\n")], ["a\n", "b\n"]),
        ([chunk(0, "a\n"), chunk(9, "z\n"), chunk(11, "!"), ended("a\n1234567z\n!")], ["a\n", "1234567z\n!"]),
        ([chunk(4, "b\n"), ended("a\n1\nb\n")], ["a\n1\nb\n"]),
        ([chunk(0, "123456"), ended("123… left out …56")], ["123456", "… left out …56"]),
        ([": ping\n\n", ended("")], []),
    ],
    ids=["whole", "rest", "gap", "late", "cut", "none"],
)
def test_the_pieces_of_a_run_are_its_whole_output(run: Any, sent: list[str], received: list[str]) -> None:
    with scripted(problem(503, "service", Retry_After="0"), stream(*sent)) as server:
        found, report = run(server.url, pieces)
    assert (found, report.id) == (received, "r")
    assert [request.headers["accept"] for request in server.requests] == ["text/event-stream"] * 2
    assert len({request.headers["idempotency-key"] for request in server.requests}) == 1


def test_a_run_whose_connection_is_lost_is_not_sent_again(run: Any) -> None:
    with scripted(stream(chunk(0, "a"), ends_well=False)) as server, pytest.raises(UnreachableError):
        run(server.url, pieces)
    assert len(server.requests) == 1
    with scripted(stream(chunk(0, "a"))) as server, pytest.raises(UnreachableError, match="before the run"):
        run(server.url, pieces)


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (problem(422, "argument"), ApiError),
        (json_answer("{}"), InvalidAnswerError),
        (stream("event: run.ended\ndata: {}\n\n"), InvalidAnswerError),
    ],
)
def test_a_run_that_cannot_be_streamed_ends_at_once(run: Any, answer: Any, kind: type[ClientError]) -> None:
    with scripted(answer) as server, pytest.raises(kind):
        run(server.url, pieces)
    assert len(server.requests) == 1


def test_a_run_without_a_report_raises_its_problem(run: Any) -> None:
    document = Problem(title="t", status=504, detail="d", code="call_timeout").model_dump_json()
    failed = f"event: problem\ndata: {document}\n\n"
    with scripted(stream(chunk(0, "a"), failed)) as server, pytest.raises(UnavailableError) as caught:
        run(server.url, pieces)
    assert caught.value.code == "call_timeout"
    assert len(server.requests) == 1


# Files


def test_a_cut_download_goes_on_where_it_ended(run: Any, tmp_path: Path) -> None:
    content = bytes(range(256)) * 4000
    answers = [
        partial(content, sends=400_000, etag='"a"'),
        partial(content, sends=300_000, etag='"a"'),
        partial(content, sends=len(content), etag='"a"'),
    ]
    with scripted(*answers) as server:
        size = run(server.url, lambda client: client.chat("c").files.download("f1", tmp_path / "out"))
    assert size == len(content)
    assert (tmp_path / "out").read_bytes() == content
    assert [request.headers.get("if-range") for request in server.requests] == [None, '"a"', '"a"']


def test_a_file_that_changed_during_its_download_is_not_mixed(run: Any, tmp_path: Path) -> None:
    from scripted_server import answer

    answers = [
        partial(b"old" * 100_000, sends=1000, etag='"a"'),
        answer(200, b"new", "text/plain", ETag='"b"'),
    ]
    with scripted(*answers) as server, pytest.raises(InvalidAnswerError, match="changed"):
        run(server.url, lambda client: client.chat("c").files.download("f1", tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_a_download_overwrites_nothing(run: Any, tmp_path: Path) -> None:
    (tmp_path / "out").write_text("mine")
    with scripted(cut) as server, pytest.raises(FileExistsError):
        run(server.url, lambda client: client.chat("c").files.download("f1", tmp_path / "out"))
    assert (tmp_path / "out").read_text() == "mine"


def test_a_range_goes_into_a_stream(run: Any) -> None:
    with scripted(partial(b"0123456789", sends=10, etag='"a"')) as server:
        assert run(server.url, lambda client: client.chat("c").files.read("f", start=4)) == b"456789"
        target = BytesIO()
        assert run(server.url, lambda client: client.chat("c").files.download("f", target)) == 10
    assert server.requests[0].headers["range"] == "bytes=4-"


# Both clients


def members(kind: type) -> dict[str, list[tuple[str, Any, Any]]]:
    """Public methods with their parameters."""
    return {
        name: [(p.name, p.kind, p.default) for p in inspect.signature(member).parameters.values()]
        for name, member in inspect.getmembers(kind, inspect.isfunction)
        if not name.startswith("_")
    }


@pytest.mark.parametrize(
    "name",
    ["Client", "Chat", "EventStream", "Files", "Turns", "Jobs", "Timers", "DeadLetters", "Keys", "RunStream"],
)
def test_both_clients_have_the_same_methods(name: str) -> None:
    from nekro_client import async_chats, async_client, async_connections, chats, client, connections

    modules = (chats, async_chats, client, async_client, connections, async_connections)
    kinds = {name: value for module in modules for name, value in vars(module).items()}
    assert members(kinds[name]) == members(kinds[f"Async{name}"])


def test_a_request_is_a_method_of_both_clients_with_its_parameters_and_documentation() -> None:
    client, other = Client("http://127.0.0.1:1", ""), AsyncClient("http://127.0.0.1:1", "")
    for method in (client.turns.get, other.turns.get):
        assert [*inspect.signature(method).parameters] == ["turn_id", "with_values", "with_prompts"]
        assert inspect.signature(method).return_annotation == "Turn"
        assert (method.__doc__ or "").startswith("Return a turn with its rounds")
    assert inspect.signature(client.keys.list).return_annotation == "list[ApiKey]"
    assert not inspect.iscoroutinefunction(client.turns.get)
    assert inspect.iscoroutinefunction(other.turns.get) and inspect.iscoroutinefunction(other.methods)


def test_the_address_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NEKRO_URL", raising=False)
    with pytest.raises(ClientError, match="NEKRO_URL"):
        Client()
    with pytest.raises(ClientError, match="ftp://host"):
        Client("ftp://host")
    with scripted(json_answer('{"items": []}')) as server:
        monkeypatch.setenv("NEKRO_URL", f"{server.url}/agent/")
        monkeypatch.setenv("NEKRO_KEY", "nk_1_2")
        with Client() as client:
            assert client.methods() == []
    assert server.requests[0].path == "/agent/api/v1/methods"
    assert server.requests[0].headers["authorization"] == "Bearer nk_1_2"


@pytest.mark.parametrize("key", ["", ".", ".."])
def test_a_key_that_no_path_can_have_is_refused(key: str) -> None:
    with Client("http://127.0.0.1:1", "") as client, pytest.raises(ValueError, match="chat key"):
        client.chat(key)


def test_the_package_names_what_it_exports() -> None:
    assert all(hasattr(nekro_client, name) for name in nekro_client.__all__)
    assert Chat.__module__ == "nekro_client.chats"


@pytest.mark.parametrize(
    ("url", "key", "reads"),
    [
        ("http://127.0.0.1:1", None, False),
        ("http://127.0.0.1:1", "nk_key", True),  # the environment may name a proxy that is reached by TLS
        ("https://127.0.0.1:1", None, True),
    ],
)
async def test_authorities_are_read_for_connections_that_may_need_them(
    url: str, key: str | None, reads: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ssl.SSLError("read")

    monkeypatch.delenv("NEKRO_KEY", raising=False)
    monkeypatch.setattr(ssl, "create_default_context", fail)
    for connect in (Client, AsyncClient):
        if reads:
            with pytest.raises(ssl.SSLError):
                connect(url, key)
        else:
            connect(url, key)
    context = tls_of(url, None if reads else httpx.Auth())
    if isinstance(context, ssl.SSLContext):  # it has no authority
        assert (context.verify_mode, context.get_ca_certs()) == (ssl.CERT_REQUIRED, [])
