"""Every command on a shared connection gets its own reply or a timely error, whatever Redis does."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import inspect
import shutil
import socket
import ssl
import subprocess
import tempfile
import threading
import uuid
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
import uvloop
from redis_process import RedisServer
from redis_relay import RESET, RedisRelay
from waiting import WAIT_SECONDS

from broker_config.primaries import NotPrimaryError
from broker_config.redis_endpoint import RedisEndpoint, info_of_reply
from broker_config.settings import BrokerSettings
from nekro.broker.celery.result_backend import STORE
from nekro.broker.redis import link as redis_link
from nekro.broker.redis.link import RedisLink, Script

#: Longer than any wait of a passing test, shorter than a test's timeout.


class World:
    """A relay in front of the session's Redis, and links that are closed after the test."""

    def __init__(self, port: int) -> None:
        self.redis_port, self.relay = port, RedisRelay(port)
        self._links: list[RedisLink] = []

    async def __aenter__(self) -> World:
        await self.relay.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        for link in self._links:
            link.abort()
        await self.relay.__aexit__()

    def link(self, url: str | None = None, *, reply_seconds: float = 5) -> RedisLink:
        """Create a link; without a URL it connects through the relay."""
        link = RedisLink(BrokerSettings(socket_timeout_seconds=reply_seconds), url or self.relay.url)
        self._links.append(link)
        return link


def on_both_loops(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run a test on asyncio's own loop, which callers use, and on uvloop, which workers use."""

    def run(loop_factory: Any, redis_server: RedisServer, **fixtures: Any) -> None:
        async def main() -> None:
            async with asyncio.timeout(WAIT_SECONDS), World(redis_server.port) as world:
                await test(world, **fixtures)

        with asyncio.Runner(loop_factory=loop_factory) as runner:
            runner.run(main())

    _, *others = inspect.signature(test).parameters.values()
    own = inspect.signature(run).parameters
    signature = inspect.Signature([own["loop_factory"], own["redis_server"], *others])
    run.__signature__ = signature  # type: ignore[attr-defined]
    run.__name__ = test.__name__
    factories = [asyncio.new_event_loop, uvloop.new_event_loop]
    return pytest.mark.parametrize("loop_factory", factories, ids=["asyncio", "uvloop"])(run)


@pytest.fixture
def key() -> str:
    """A key that no other test uses."""
    return f"link:{uuid.uuid4().hex}"


async def outcomes(*awaitables: Any) -> list[Any]:
    """Outcomes of concurrent awaitables: each one's value, or its error."""
    tasks = [asyncio.ensure_future(each) for each in awaitables]
    await asyncio.gather(*tasks, return_exceptions=True)
    return [_outcome(task) for task in tasks]


def _outcome(task: asyncio.Future[Any]) -> Any:
    if task.cancelled():
        return asyncio.CancelledError()
    error = task.exception()
    assert error is not None or not isinstance(task.result(), Exception), "an error was returned"
    return task.result() if error is None else error


async def works(link: RedisLink) -> bool:
    """Whether a command gets its reply."""
    return (await outcomes(link.execute("ECHO", "x"))) == [b"x"]


def loses_patience(link: RedisLink) -> None:
    """Shorten the time limit for replies of a link's connection; the next one has the usual limit again."""
    exchange = link._exchange
    assert exchange is not None and exchange._alarm is not None
    exchange._alarm.cancel()
    exchange._alarm, exchange._reply_seconds = None, 0.3


async def started(link: RedisLink, *command: Any, **options: Any) -> asyncio.Task[Any]:
    """Send a command on an open connection; returns the future of its reply."""
    waiting = asyncio.create_task(link.execute(*command, **options))
    await asyncio.sleep(0)
    return waiting


@pytest.fixture
def resetting_server() -> Iterator[int]:
    """A server that answers the first command of each connection and resets it; yields its port."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                peer, _ = listener.accept()
                with peer, contextlib.suppress(OSError):
                    peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
                    peer.recv(4096)
                    peer.sendall(b"+OK\r\n")

    thread = threading.Thread(target=serve)
    thread.start()
    yield int(listener.getsockname()[1])
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    thread.join()


@on_both_loops
async def test_a_reset_during_connect_is_a_connection_error(world: World, resetting_server: int) -> None:
    # uvloop refuses to write to a connection that was just reset; about half of the attempts hit that.
    for _ in range(40):
        link = world.link(f"redis://127.0.0.1:{resetting_server}/0")
        with pytest.raises(redis.ConnectionError):
            await link.execute("PING")


@on_both_loops
async def test_concurrent_commands_on_one_connection_get_their_own_replies(world: World) -> None:
    link = world.link()
    texts = [f"{number}-{'x' * (number * 37 % 5000)}".encode() for number in range(600)]
    assert await outcomes(*(link.execute("ECHO", text) for text in texts)) == texts
    assert world.relay.accepted == 1


@on_both_loops
async def test_large_values_travel_both_ways_among_small_ones(world: World, key: str) -> None:
    link, value = world.link(), b"0123456789abcdef" * (20 << 16)
    replies = await outcomes(
        link.execute("ECHO", "before"),
        link.execute("SET", key, value, "EX", 60),
        link.execute("GET", key),
        link.execute("ECHO", "behind"),
    )
    assert (replies[0], replies[1], replies[3]) == (b"before", b"OK", b"behind")
    assert replies[2] == value


@on_both_loops
async def test_error_reply_reaches_its_own_command_only(world: World, key: str) -> None:
    link = world.link()
    assert await link.execute("SET", key, "text", "EX", 60) == b"OK"
    replies = await outcomes(
        link.execute("ECHO", "a"),
        link.execute("LPUSH", key, "x"),
        link.execute("EVALSHA", "0" * 40, 0),
        link.execute("NO-SUCH-COMMAND"),
        link.execute("ECHO", "b"),
    )
    assert (replies[0], replies[4]) == (b"a", b"b")
    assert [type(reply) for reply in replies[1:4]] == [
        redis.ResponseError,
        redis.exceptions.NoScriptError,
        redis.ResponseError,
    ]
    assert str(replies[1]).startswith("WRONGTYPE")
    assert await works(link)


@on_both_loops
async def test_exhausted_memory_is_reported_for_commands_and_scripts(
    world: World, own_redis: RedisServer, key: str
) -> None:
    link = world.link(own_redis.url)
    assert await link.execute("CONFIG", "SET", "maxmemory", 1) == b"OK"
    plain, script, other = await outcomes(
        link.execute("SET", key, "x"),
        link.run(STORE, [key, ""], "payload", 60, 60, 0),
        link.execute("ECHO", "x"),
    )
    assert isinstance(plain, redis.exceptions.OutOfMemoryError)
    assert isinstance(script, redis.exceptions.OutOfMemoryError)
    assert other == b"x"


@on_both_loops
async def test_a_script_runs_whether_or_not_redis_has_it_cached(world: World, key: str) -> None:
    link = world.link()
    script = Script(f"return {{KEYS[1], ARGV[1], '{key}'}}")
    expected = [b"k", b"v", key.encode()]
    assert await link.run(script, ["k"], "v") == expected
    assert await link.execute("SCRIPT", "EXISTS", script.sha) == [1]
    assert await link.run(script, ["k"], "v") == expected
    assert await link.execute("SCRIPT", "FLUSH") == b"OK"
    assert await outcomes(*(link.run(script, ["k"], "v") for _ in range(5))) == [expected] * 5


@on_both_loops
async def test_cancelled_command_does_not_shift_replies(world: World, key: str) -> None:
    link = world.link()
    assert await works(link)
    first = await started(link, "ECHO", "first")
    given_up = await started(link, "INCR", key)
    last = await started(link, "ECHO", "last")
    given_up.cancel()
    assert (await outcomes(first, last)) == [b"first", b"last"]
    assert given_up.cancelled()
    assert await link.execute("GET", key) == b"1", "it was sent before it was given up"
    assert await link.execute("DEL", key) == 1


@on_both_loops
async def test_unencodable_command_does_not_shift_replies(world: World) -> None:
    link = world.link()
    assert await works(link)
    unwritable: Any = object()
    replies = await outcomes(
        link.execute("ECHO", "a"),
        link.execute("ECHO", unwritable),
        link.execute("ECHO", "\ud800"),
        link.execute("ECHO", "b"),
    )
    assert (replies[0], replies[3]) == (b"a", b"b")
    assert isinstance(replies[1], TypeError)
    assert isinstance(replies[2], UnicodeEncodeError)


@on_both_loops
async def test_silence_fails_all_pending_commands_and_the_next_one_reconnects(world: World) -> None:
    link = world.link()
    assert await works(link)
    loses_patience(link)
    world.relay.mute()
    replies = await outcomes(*(link.execute("ECHO", "x") for _ in range(3)))
    assert [type(reply) for reply in replies] == [redis.TimeoutError] * 3
    assert await works(link)
    assert world.relay.accepted == 2


@on_both_loops
async def test_server_that_accepts_and_never_answers_is_an_error(world: World) -> None:
    # As long as a busy machine may delay the reply.
    link = world.link(reply_seconds=3)
    world.relay.is_mute = True
    assert [type(reply) for reply in await outcomes(link.execute("ECHO", "x"))] == [redis.TimeoutError]
    world.relay.is_mute = False
    assert await works(link)


@on_both_loops
async def test_cancelling_a_command_during_connect_leaves_no_connection(world: World) -> None:
    link = world.link()
    world.relay.is_mute = True
    waiting = await started(link, "ECHO", "x")
    while not world.relay.accepted:
        await asyncio.sleep(0)
    while (
        not waiting.done()
    ):  # Python 3.11 loses a cancellation that arrives during redis-py's wait for a write
        waiting.cancel()
        await asyncio.sleep(0)
    assert waiting.cancelled()
    del waiting
    gc.collect()  # an unclosed connection would warn, and warnings are errors
    await world.relay.clients[0].is_gone.wait()
    world.relay.is_mute = False
    assert await works(link)


@on_both_loops
async def test_refused_connection_is_an_error(world: World) -> None:
    link = world.link()
    await world.relay.__aexit__()
    (error,) = await outcomes(link.execute("ECHO", "x"))
    assert isinstance(error, redis.ConnectionError)


@on_both_loops
async def test_blocking_command_may_take_longer_than_the_reply_timeout(world: World, key: str) -> None:
    # As long as a busy machine may delay the reply.
    link = world.link(reply_seconds=3)
    assert await outcomes(link.execute("BLPOP", key, 3.2, blocks_seconds=3.2)) == [None]
    (error,) = await outcomes(link.execute("BLPOP", key, 600))
    assert isinstance(error, redis.TimeoutError), "the limit would have ended it"


@on_both_loops
async def test_blocking_command_extends_the_timeout_only_while_it_runs(world: World, key: str) -> None:
    link, pusher = world.link(), world.link()
    assert await works(link)
    loses_patience(link)
    assert await pusher.execute("RPUSH", key, "x") == 1
    assert await link.execute("BLPOP", key, 600, blocks_seconds=600) == [key.encode(), b"x"]
    world.relay.mute()
    (error,) = await outcomes(link.execute("ECHO", "x"))
    assert isinstance(error, redis.TimeoutError)


@pytest.mark.parametrize(
    "end",
    [
        pytest.param(lambda relay: relay.hang_up(), id="closes"),
        pytest.param(lambda relay: relay.reset(), id="resets"),
        pytest.param(lambda relay: relay.say(b"HTTP/1.1 400 Bad Request\r\n\r\n"), id="garbage"),
    ],
)
@pytest.mark.parametrize("is_idle", [True, False], ids=["idle", "busy"])
@on_both_loops
async def test_closed_connection_is_an_error_and_the_next_command_reconnects(
    world: World, key: str, end: Callable[[RedisRelay], None], is_idle: bool
) -> None:
    link = world.link()
    assert await works(link)
    exchange = link._exchange
    assert exchange is not None
    waiting = [] if is_idle else [await started(link, "BLPOP", key, 30, blocks_seconds=30) for _ in range(2)]
    end(world.relay)
    replies = await outcomes(*waiting)
    assert all(isinstance(reply, redis.ConnectionError) for reply in replies)
    while exchange.is_open:
        await asyncio.sleep(0)
    assert await works(link)
    assert world.relay.accepted == 2


@on_both_loops
async def test_connection_with_an_unexpected_reply_is_discarded(world: World) -> None:
    link = world.link()
    assert await works(link)
    exchange = link._exchange
    assert exchange is not None
    world.relay.say(b"+unasked\r\n")
    while exchange.is_open:
        await asyncio.sleep(0)
    assert await works(link)
    assert world.relay.accepted == 2


@on_both_loops
async def test_an_idle_connection_is_replaced_and_never_asked(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = world.link(reply_seconds=600)
    assert await works(link)
    monkeypatch.setattr(redis_link, "TRUSTED_SECONDS", 0)
    world.relay.mute()
    assert await works(link)
    assert await outcomes(*(link.execute("ECHO", str(number)) for number in range(20))) == [
        str(number).encode() for number in range(20)
    ]


def run_id_of(port: int) -> str:
    """Identifies the running server of a port."""
    with redis.Redis(port=port) as client:
        info: Any = client.info("server")
        return str(info["run_id"])


async def reached(link: RedisLink) -> str:
    """Run id of the server to which a link leads."""
    info: bytes = await link.execute("INFO", "server")
    return info_of_reply(info)["run_id"]


@on_both_loops
async def test_a_server_that_one_connection_meets_ends_the_others_to_the_server_before(
    world: World, own_redis: RedisServer
) -> None:
    old, new = run_id_of(world.redis_port), run_id_of(own_redis.port)
    link, other, endpoint = world.link(), world.link(), RedisEndpoint(BrokerSettings(), world.relay.url)
    assert await reached(link) == await reached(other) == old
    with endpoint.client() as client:
        assert (await asyncio.to_thread(client.info, "server"))["run_id"] == old
        world.relay.target = own_redis.port  # as a host name that moves; the server before still answers
        assert await reached(link) == old
        assert await reached(world.link()) == new
        assert await reached(link) == await reached(other) == new
        assert (await asyncio.to_thread(client.info, "server"))["run_id"] == new


@on_both_loops
async def test_commands_in_flight_are_answered_when_their_connection_is_replaced(
    world: World, own_redis: RedisServer, key: str
) -> None:
    link = world.link()
    assert await works(link)
    popping = await started(link, "BLPOP", key, 30, blocks_seconds=30)
    world.relay.target = own_redis.port
    link.doubt()
    assert await reached(link) == run_id_of(own_redis.port)
    with redis.Redis(port=world.redis_port) as client:
        client.rpush(key, "x")
    assert await popping == [key.encode(), b"x"]
    await world.relay.clients[0].is_gone.wait()


@on_both_loops
async def test_a_replica_is_refused_by_every_kind_of_connection(world: World, own_redis: RedisServer) -> None:
    with redis.Redis(port=own_redis.port) as client:
        client.replicaof("127.0.0.1", str(world.redis_port))  # type: ignore[no-untyped-call]
    (error,) = await outcomes(world.link(own_redis.url).execute("PING"))
    assert isinstance(error, NotPrimaryError) and "a replica" in str(error)
    with RedisEndpoint(BrokerSettings(), own_redis.url).client() as client, pytest.raises(NotPrimaryError):
        await asyncio.to_thread(client.ping)


@on_both_loops
async def test_a_refused_write_ends_connections_that_only_read(world: World, own_redis: RedisServer) -> None:
    writer, reader = world.link(own_redis.url), world.link(own_redis.url)
    assert await works(writer) and await works(reader)
    with redis.Redis(port=own_redis.port) as client:
        client.replicaof("127.0.0.1", str(world.redis_port))  # type: ignore[no-untyped-call]
    (refused,) = await outcomes(writer.execute("SET", "k", "y"))
    assert isinstance(refused, NotPrimaryError)
    (error,) = await outcomes(reader.execute("GET", "k"))
    assert isinstance(error, NotPrimaryError)


@on_both_loops
async def test_password_and_database_of_the_url_are_used(
    world: World, own_redis: RedisServer, key: str
) -> None:
    with redis.Redis(port=own_redis.port, db=3) as client:
        client.config_set("requirepass", "open sesame")
        link = world.link(f"redis://:open%20sesame@127.0.0.1:{own_redis.port}/3")
        assert await link.execute("SET", key, "x") == b"OK"
        assert client.get(key) == b"x"
        for password in ("", ":wrong@"):
            (error,) = await outcomes(
                world.link(f"redis://{password}127.0.0.1:{own_redis.port}/3").execute("GET", key)
            )
            assert isinstance(error, redis.AuthenticationError)


@pytest.mark.parametrize("url", ["unix://{}?db=0", "redis+socket://{}?virtual_host=0"])
@on_both_loops
async def test_unix_socket_urls_work_in_both_spellings(world: World, url: str) -> None:
    # The path of a Unix socket has at most 107 bytes; pytest's directories may exceed that.
    with tempfile.TemporaryDirectory(prefix="nk", dir="/tmp") as directory:
        path = Path(directory, "s")
        async with RedisRelay(world.redis_port, path=path) as relay:
            assert await works(world.link(url.format(path)))
            assert relay.accepted == 1


@on_both_loops
async def test_encrypted_connection_works(world: World, tmp_path: Path) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("no openssl to make a certificate")
    certificate, private = tmp_path / "cert.pem", tmp_path / "key.pem"
    subprocess.run(
        [
            "openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
            "-keyout", private, "-out", certificate, "-subj", "/CN=localhost", "-days", "2",
            "-addext", "subjectAltName=IP:127.0.0.1",
        ],
        check=True,
        capture_output=True,
    )  # fmt: skip
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, private)
    async with RedisRelay(world.redis_port, tls=context) as relay:
        link = world.link(f"{relay.url}?ssl_ca_certs={certificate}")
        value = b"0123456789abcdef" * (4 << 16)
        texts = [b"%d" % number for number in range(200)]
        echoes = await outcomes(link.execute("ECHO", value), *(link.execute("ECHO", text) for text in texts))
        assert echoes == [value, *texts]
        relay.hang_up()
        exchange = link._exchange
        while exchange is not None and exchange.is_open:
            await asyncio.sleep(0)
        assert await works(link)
        assert relay.accepted == 2
        await link.close()


@on_both_loops
async def test_a_command_cancelled_during_connect_leaves_no_connection(world: World) -> None:
    world.relay.mute_at = b"\r\nINFO\r\n"
    link = world.link(reply_seconds=600)
    command = asyncio.ensure_future(link.execute("PING"))
    while not (world.relay.clients and world.relay.clients[0].is_mute):
        await asyncio.sleep(0.01)
    command.cancel()
    await asyncio.wait({command})
    await world.relay.clients[0].is_gone.wait()


@on_both_loops
async def test_close_waits_for_pending_replies_and_the_link_can_be_used_again(world: World, key: str) -> None:
    link, pusher = world.link(), world.link()
    assert await works(link)
    popping = await started(link, "BLPOP", key, 30, blocks_seconds=30)
    closing = asyncio.create_task(link.close())
    assert await pusher.execute("RPUSH", key, "x") == 1
    assert await outcomes(popping, closing) == [[key.encode(), b"x"], None]
    await world.relay.clients[0].is_gone.wait()
    assert await works(link)


@on_both_loops
async def test_close_does_not_wait_for_replies_of_cancelled_commands(world: World, key: str) -> None:
    link = world.link()
    assert await works(link)
    popping = await started(link, "BLPOP", key, 600, blocks_seconds=600)
    popping.cancel()
    assert isinstance((await outcomes(popping))[0], asyncio.CancelledError)
    assert await outcomes(link.close()) == [None]
    await world.relay.clients[0].is_gone.wait()


@on_both_loops
async def test_a_cancelled_close_leaves_no_connection(world: World, key: str) -> None:
    link = world.link()
    assert await works(link)
    popping = await started(link, "BLPOP", key, 600, blocks_seconds=600)
    closing = asyncio.create_task(link.close())
    await asyncio.sleep(0)
    closing.cancel()
    popped, closed = await outcomes(popping, closing)
    assert isinstance(popped, redis.ConnectionError) and isinstance(closed, asyncio.CancelledError)
    await world.relay.clients[0].is_gone.wait()


@on_both_loops
async def test_a_link_that_is_closed_while_it_connects_leaves_no_connection(world: World) -> None:
    link = world.link(reply_seconds=600)
    command = asyncio.ensure_future(link.execute("PING"))
    await asyncio.sleep(0)  # before there is a connection
    await link.close()
    assert isinstance((await outcomes(command))[0], redis.ConnectionError)
    await world.relay.clients[0].is_gone.wait()
    assert await works(link)


@on_both_loops
async def test_abort_closes_a_connection_that_was_replaced(world: World, key: str) -> None:
    link = world.link()
    assert await works(link)
    popping = await started(link, "BLPOP", key, 600, blocks_seconds=600)
    link.doubt()
    assert await works(link)
    link.abort()
    assert isinstance((await outcomes(popping))[0], redis.ConnectionError)
    for client in world.relay.clients:
        await client.is_gone.wait()


@on_both_loops
async def test_abort_fails_pending_commands(world: World, key: str) -> None:
    link = world.link()
    assert await works(link)
    popping = await started(link, "BLPOP", key, 600, blocks_seconds=600)
    link.abort()
    assert isinstance((await outcomes(popping))[0], redis.ConnectionError)
    await world.relay.clients[0].is_gone.wait()


@on_both_loops
async def test_a_failing_subscriber_gets_the_next_message(
    world: World, key: str, logged: list[tuple[str, dict[str, Any]]]
) -> None:
    received: asyncio.Queue[bytes] = asyncio.Queue()

    def on_message(message: bytes) -> None:
        if message == b"bad":
            raise ValueError("cannot be read")
        received.put_nowait(message)

    subscriber = RedisLink(BrokerSettings(), world.relay.url, on_message=on_message)
    try:
        await subscriber.execute("SUBSCRIBE", key)
        for message in ("bad", "good"):
            assert await world.link().execute("PUBLISH", key, message) == 1
        assert await received.get() == b"good"
    finally:
        subscriber.abort()
    assert ("message_not_handled", key) in [(event, fields.get("channel")) for event, fields in logged]
