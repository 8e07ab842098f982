"""The part of the test of compose.yaml that asks its gateways, as an application on the host does."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any, Final, Protocol

__all__ = ["PLUGIN_HTTP", "PORTS", "check_gateway"]

#: The host's ports of the two gateways.
PORTS: Final = (18600, 18601)
PLUGIN_HTTP: Final = "Probe.where=key"
CHAT: Final = "api-1"
TURN: Final = ["message.received", "turn.started", "round.started", "round.ended", "turn.ended"]
#: Prints the address of a worker's site, and what it answers to a request that no gateway has signed.
UNSIGNED: Final = """
import asyncio, urllib.error, urllib.request
from broker_config.settings import Settings
from storage.engine import Database

async def sites():
    settings = Settings.load()
    database = Database(settings.database, settings.data_dir)
    async with database.read() as transaction:
        return await transaction.catalogue.sites_of("Probe.where")

for site in asyncio.run(sites()):
    request = urllib.request.Request(f"http://{site.address}/plugins/Probe.where/where", data=b"x")
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            status = answer.status
    except urllib.error.HTTPError as exc:
        status = exc.code
    print(site.host, site.address, status)
"""


class Composed(Protocol):
    """What this part needs of the composed system."""

    def compose(self, *arguments: str, given: str | None = None) -> str:
        """Run one command of Compose."""
        ...

    def containers(self, service: str) -> list[str]:
        """Ids of a service's containers."""
        ...

    def wait_healthy(self, **counts: int) -> None:
        """Wait until services are healthy."""
        ...


def check_gateway(system: Composed) -> None:
    """Two gateways: keys, a message and its events, a call, a ticket, a route of a plugin elsewhere."""
    made = system.compose(
        "run", "--rm", "-T", "methods", "keys", "create", "site",
        "--scope", "read", "--scope", "post", "--scope", "call", "--json",
    )  # fmt: skip
    key = {"Authorization": f"Bearer {json.loads(made)['key']}"}
    system.compose("--profile", "api", "up", "-d", "--no-build", "--scale", "gateway=2", "gateway")
    system.wait_healthy(gateway=2)
    one, other = (f"http://127.0.0.1:{port}" for port in PORTS)
    for path in ("/api/v1/methods", f"/api/v1/chats/{CHAT}/events", "/plugins/Probe.where/where"):
        assert _status(one + path, {}) == 401, path

    posted = _ask(
        f"{one}/api/v1/chats/{CHAT}/messages", key, {"text": "file our plan candles", "user_id": "ada"}
    )
    events = list(_events(f"{other}/api/v1/chats/{CHAT}/events?after=0", key, until="turn.ended"))
    types = [event["type"] for event in events]
    assert [name for name in types if name in TURN] == [*TURN[:4], *TURN[2:]], types
    assert {event["turn_id"] for event in events} == {posted["turn_id"]}, events
    (sent,) = [event for event in events if event["type"] == "message.sent"]
    assert "The note says: Plan\ncandles" in sent["data"]["text"], sent
    began = [event["number"] for event in events if event["type"] == "call.started"]
    assert any(event["number"] in began for event in events if event["call_id"] == sent["call_id"])
    assert min(e["number"] for e in events if e["call_id"] == sent["call_id"]) < sent["number"]

    call = {"method": "read_note", "chat_key": CHAT, "args": ["fair"], "user_id": "ada"}
    assert "candles" in _ask(f"{other}/api/v1/calls", key, call)["value"]

    ticket = _ask(f"{one}/api/v1/stream-tickets", key, {"chat_key": CHAT})
    again = list(_events(f"{other}{ticket['path']}&after=0", {}, until="turn.ended"))
    assert [event["number"] for event in again if event["number"]] == [
        event["number"] for event in events if event["number"]
    ]

    long = {name[:12] for name in system.containers("long")}
    gateways = {name[:12] for name in system.containers("gateway")}
    for gateway in (one, other):
        where = _ask(f"{gateway}/plugins/Probe.where/where", key, {"a": 1})
        assert where["host"] in long and where["host"] not in gateways, (where, long)
        assert json.loads(where["body"]) == {"a": 1} and not where["has_key"], where
    unsigned = system.compose("exec", "-T", "gateway", "python", "-c", UNSIGNED).split("\n")
    found = [line.split() for line in unsigned if line]
    assert found and all(status in ("401", "403") for _, _, status in found), unsigned
    assert {host for host, _, _ in found} == long, (found, long)


def _request(url: str, headers: dict[str, str], body: Any = None) -> urllib.request.Request:
    content = None if body is None else json.dumps(body).encode()
    return urllib.request.Request(url, content, {"Content-Type": "application/json", **headers})


def _ask(url: str, headers: dict[str, str], body: Any) -> dict[str, Any]:
    try:
        with urllib.request.urlopen(_request(url, headers, body), timeout=60) as answer:
            found: dict[str, Any] = json.load(answer)
    except urllib.error.HTTPError as exc:
        raise AssertionError(f"{url}: {exc.code} {exc.read()!r}") from exc
    return found


def _status(url: str, headers: dict[str, str]) -> int:
    try:
        with urllib.request.urlopen(_request(url, headers), timeout=60) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as exc:
        return exc.code


def _events(url: str, headers: dict[str, str], *, until: str) -> Iterator[dict[str, Any]]:
    """Yield the events of a stream up to the first one of a type."""
    with urllib.request.urlopen(_request(url, headers), timeout=60) as stream:
        for line in stream:
            if line.startswith(b"data: "):
                event = json.loads(line[6:])
                yield event
                if event["type"] == until:
                    return
