"""Events of chats that are delivered to URLs, by several gateways, to receivers that fail."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any
from uuid import uuid4

import httpx
import pytest
from fastapi import FastAPI, Request, Response
from gateway_server import served
from metric_values import figures_of, parsed
from standardwebhooks import Webhook as Signature
from stream_server import StreamServer
from waiting import eventually
from worker_fleet import Fleet

from broker_config.settings import Settings
from nekro.app.fleet_metrics import FleetFigures
from nekro.app.services import Services
from nekro.extensions.webhooks import sender
from nekro.extensions.webhooks.rows import Webhook
from nekro.gateway.app import create_app
from nekro_agent.ports import IncomingMessage
from storage.repositories.events import ChatEvent


class Receiver:
    """An HTTP server that checks signatures and answers as it is told."""

    def __init__(self) -> None:
        self.secret = ""
        #: Webhook ids with their payloads, in the order of arrival.
        self.received: list[tuple[str, dict[str, Any]]] = []
        #: Statuses of the next answers; then 204.
        self.statuses: list[int] = []
        self.url = ""
        self.app = FastAPI()
        self.app.post("/hook")(self.take)
        self.app.get("/secret")(self.leak)
        self.leaks = 0

    async def take(self, request: Request) -> Response:
        body = await request.body()
        payload = Signature(self.secret).verify(body, dict(request.headers))
        self.received.append((request.headers["webhook-id"], payload))
        status = self.statuses.pop(0) if self.statuses else 204
        return Response(status_code=status, headers={"Location": "/secret"} if status == 302 else None)

    async def leak(self) -> None:
        self.leaks += 1

    def texts(self) -> list[str]:
        return [payload["data"]["data"]["text"] for _, payload in self.received]


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pauses between attempts take no time."""
    monkeypatch.setattr(sender, "_FIRST_PAUSE_SECONDS", 0.05)


@pytest.fixture
async def receiver() -> AsyncIterator[Receiver]:
    receiver = Receiver()
    async with served(receiver.app) as client:
        receiver.url = f"{client.base_url}/hook".replace("//hook", "/hook")
        yield receiver


@pytest.fixture(scope="module")
def fleet(make_fleet: Callable[..., Fleet]) -> Fleet:
    return make_fleet(plugins={"dirs": (), "load_shipped": False})


@pytest.fixture
async def services(fleet: Fleet) -> AsyncIterator[Services]:
    services = fleet.services()
    await services.start()
    yield services
    await services.close()


def opened(settings: Settings, **options: Any) -> Settings:
    values = {"webhook_allow_private": ("127.0.0.1",), **options}
    return settings.model_copy(update={"gateway": settings.gateway.model_copy(update=values)})


@asynccontextmanager
async def gateway(fleet: Fleet, **options: Any) -> AsyncIterator[httpx.AsyncClient]:
    async with served(create_app(opened(fleet.settings, **options))) as http:
        http.timeout = httpx.Timeout(60)
        http.base_url = http.base_url.join("/api/v1/")
        yield http


async def subscribe(http: httpx.AsyncClient, receiver: Receiver, chat_key: str, **fields: Any) -> str:
    body = {"url": receiver.url, "events": ["message.*"], "chats": chat_key, **fields}
    created = await http.post("webhooks", json=body)
    assert created.status_code == 201, created.text
    receiver.secret = created.json()["secret"]
    return str(created.json()["id"])


async def write(services: Services, chat_key: str, *texts: str) -> None:
    for text in texts:
        message = IncomingMessage(chat_key=chat_key, text=text, user_id="u", user_name="Uma", is_tome=False)
        await services.intake.receive(message)


async def deliveries(http: httpx.AsyncClient, webhook_id: str, **query: Any) -> list[dict[str, Any]]:
    answer = await http.get(f"webhooks/{webhook_id}/deliveries", params=query)
    assert answer.status_code == 200, answer.text
    return list(answer.json()["items"])


@pytest.fixture
def chat_key() -> str:
    return f"group_{uuid4().hex[:8]}"


async def test_events_from_the_subscription_on_arrive_signed(
    fleet: Fleet, services: Services, receiver: Receiver, chat_key: str
) -> None:
    await write(services, chat_key, "before")
    async with gateway(fleet) as http:
        webhook_id = await subscribe(http, receiver, chat_key)
        await write(services, chat_key, "one", "two")
        await write(services, f"{chat_key}_other", "elsewhere")
        await eventually(lambda: sorted(receiver.texts()) == ["one", "two"], what="both arrive")
        (first, payload), _ = sorted(receiver.received, key=lambda one: one[1]["data"]["number"])
        assert (payload["type"], payload["data"]["chat_key"]) == ("message.received", chat_key)
        assert payload["timestamp"].endswith("Z")

        async def all_done() -> bool:
            found = await deliveries(http, webhook_id)
            return [(one["state"], one["attempts"], one["status"]) for one in found] == [("done", 1, 204)] * 2

        await eventually(all_done, what="both are recorded")
        page = await http.get(f"webhooks/{webhook_id}/deliveries", params={"limit": 1})
        assert page.json()["next_cursor"]
        replayed = await http.post(f"webhooks/{webhook_id}/replay", json={"delivery_id": first})
        assert replayed.json() == {"count": 1}
        await eventually(
            lambda: Counter(one for one, _ in receiver.received)[first] == 2, what="it arrives again"
        )
        renewed = (await http.post(f"webhooks/{webhook_id}/secret")).json()["secret"]
        assert renewed != receiver.secret
        receiver.secret = renewed
        await write(services, chat_key, "three")
        await eventually(lambda: "three" in receiver.texts(), what="the new secret signs")
        listed = (await http.get("webhooks")).json()["items"]
        assert all("secret" not in one for one in listed)
        assert (await http.delete(f"webhooks/{webhook_id}")).status_code == 204
        assert (await http.get(f"webhooks/{webhook_id}")).status_code == 404


async def test_a_text_that_is_not_unicode_is_delivered_like_the_others(
    fleet: Fleet, services: Services, receiver: Receiver, chat_key: str
) -> None:
    texts = ["half \ud83d of it", "whole"]
    async with gateway(fleet) as http:
        webhook_id = await subscribe(http, receiver, chat_key)
        await write(services, chat_key, *texts)
        await eventually(lambda: sorted(receiver.texts()) == texts, what="both arrive")
        assert (await http.delete(f"webhooks/{webhook_id}")).status_code == 204


async def test_a_webhook_whose_events_cannot_be_read_does_not_block_the_others(
    fleet: Fleet, services: Services, receiver: Receiver, chat_key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def body_of(webhook: Webhook, event: ChatEvent) -> str | None:
        if webhook.id == broken:
            raise ValueError("unexpected")
        return body_of_all(webhook, event)

    body_of_all = sender.body_of
    async with gateway(fleet) as http:
        broken = await subscribe(http, receiver, chat_key)
        whole = await subscribe(http, receiver, chat_key)
        monkeypatch.setattr(sender, "body_of", body_of)
        await write(services, chat_key, "text")
        await eventually(lambda: receiver.texts() == ["text"], what="the delivery of the other webhook")
        for webhook_id in (broken, whole):
            assert (await http.delete(f"webhooks/{webhook_id}")).status_code == 204


@pytest.mark.extended
async def test_no_error_of_a_delivery_has_the_path_of_its_url(
    fleet: Fleet,
    services: Services,
    receiver: Receiver,
    chat_key: str,
    logged: list[tuple[str, dict[str, Any]]],
) -> None:
    """Many services put their secret there."""

    async def hang_up(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    async with StreamServer(hang_up) as silent, gateway(fleet, webhook_attempts=1) as http:
        url = f"http://127.0.0.1:{silent.port}/hooks/s3cr3t?key=s3cr3t"
        webhook_id = await subscribe(http, receiver, chat_key, url=url)
        await write(services, chat_key, "lost")

        async def is_dead() -> list[dict[str, Any]]:
            return await deliveries(http, webhook_id, state="dead")

        (dead,) = await eventually(is_dead, what="it is given up")
    assert dead["error"].startswith("127.0.0.1: ") and "s3cr3t" not in dead["error"]
    assert "webhook_not_delivered" in dict(logged) and "s3cr3t" not in str(logged)


async def test_failures_are_retried_with_the_same_id_then_dead_lettered_and_replayable(
    fleet: Fleet, services: Services, receiver: Receiver, chat_key: str
) -> None:
    async with gateway(fleet, webhook_attempts=3) as http:
        before, dead_before = await attempts(http), (await asyncio.to_thread(fleet_figures, fleet))["dead"]
        webhook_id = await subscribe(http, receiver, chat_key)
        receiver.statuses = [500, 302, 200]
        await write(services, chat_key, "retried")
        await eventually(lambda: len(receiver.received) == 3, what="three attempts")
        assert len({one for one, _ in receiver.received}) == 1
        receiver.statuses = [503] * 3
        await write(services, chat_key, "dead")

        async def is_dead() -> list[dict[str, Any]]:
            return await deliveries(http, webhook_id, state="dead")

        (dead,) = await eventually(is_dead, what="it is given up")
        assert (dead["attempts"], dead["status"], dead["due_at"]) == (3, 503, None)
        assert await attempts(http) - before == Counter(sent=1, failed=4, dead=1)
        figures = await asyncio.to_thread(fleet_figures, fleet)
        assert (figures["waiting"], figures["dead"] - dead_before) == (0, 1)
        assert (await http.post(f"webhooks/{webhook_id}/replay", json={})).json() == {"count": 1}
        await eventually(lambda: receiver.texts()[-1] == "dead" and len(receiver.received) == 7, what="again")
        assert receiver.received[-1][0] == dead["id"]
        assert receiver.leaks == 0
        receiver.statuses = [410]
        await write(services, chat_key, "gone")

        async def is_off() -> bool:
            return not (await http.get(f"webhooks/{webhook_id}")).json()["is_active"]

        await eventually(is_off, what="the subscription is deactivated")
        assert "410" in (await http.get(f"webhooks/{webhook_id}")).json()["fault"]
        await write(services, chat_key, "while inactive")
        back = await http.patch(f"webhooks/{webhook_id}", json={"is_active": True})
        assert (back.json()["is_active"], back.json()["fault"]) == (True, None)
        await write(services, chat_key, "active again")
        await eventually(lambda: receiver.texts()[-1] == "active again", what="it goes on")
        assert "while inactive" not in receiver.texts()

        async def is_recorded() -> bool:
            return not await deliveries(http, webhook_id, state="waiting")

        await eventually(is_recorded, what="the end of the last delivery")
        assert (await http.delete(f"webhooks/{webhook_id}")).status_code == 204


async def test_changes_of_subscriptions_are_recorded_without_secrets(
    fleet: Fleet, receiver: Receiver, chat_key: str
) -> None:
    async with gateway(fleet) as http:
        body = {"url": f"{receiver.url}?token=hunter2", "events": ["message.*"], "chats": chat_key}
        made = (await http.post("webhooks", json=body, headers={"X-Request-Id": "made"})).json()
        url = f"webhooks/{made['id']}"
        changed = {"url": f"{receiver.url}?token=hunter3", "chats": "*"}
        assert (await http.patch(url, json=changed)).status_code == 200
        renewed = (await http.post(f"{url}/secret")).json()
        assert (await http.post(f"{url}/replay", json={})).status_code == 202
        assert (await http.post(f"{url}/replay", json={"delivery_id": "none"})).status_code == 404
        assert (await http.delete(url)).status_code == 204
        assert (await http.delete(url)).status_code == 404
        acts = (await http.get("audit", params={"limit": 5})).json()["items"]
    assert [(act["action"], act["subject"]) for act in reversed(acts)] == [
        (f"webhook.{what}", made["id"]) for what in ("create", "change", "secret", "replay", "delete")
    ]
    assert acts[-1]["data"] == {"host": "127.0.0.1", "events": ["message.*"], "chats": chat_key}
    assert acts[-1]["request_id"] == "made"
    assert acts[-2]["data"] == {"fields": ["chats", "url"], "events": None, "chats": "*"}
    for secret in (made["secret"], renewed["secret"], "hunter2", "hunter3"):
        assert secret not in str(acts)


async def attempts(http: httpx.AsyncClient) -> Counter[str]:
    """How many attempts the gateways of this process have made, by their outcome."""
    found = await figures_of(http)
    return Counter(
        {key[1]: int(value) for key, value in found.items() if key[0] == "nekro_webhook_deliveries_total"}
    )


def fleet_figures(fleet: Fleet) -> dict[str, float]:
    """What `nekro metrics` serves about deliveries."""
    figures = FleetFigures(fleet.settings)
    try:
        found = parsed(figures.text().decode())
    finally:
        figures.close()
    names = {
        "waiting": "nekro_webhook_deliveries_waiting",
        "dead": "nekro_webhook_deliveries_dead",
        "oldest": "nekro_webhook_oldest_seconds",
        "overdue": "nekro_webhook_overdue_seconds",
    }
    return {short: found[(name,)] for short, name in names.items()}


async def test_deliveries_that_no_gateway_takes_are_seen(
    fleet: Fleet, services: Services, receiver: Receiver, chat_key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sender, "_FIRST_PAUSE_SECONDS", 3600.0)
    async with gateway(fleet) as http:
        webhook_id = await subscribe(http, receiver, chat_key)
        receiver.statuses = [500]
        await write(services, chat_key, "late")

        async def has_failed() -> list[dict[str, Any]]:
            return [one for one in await deliveries(http, webhook_id) if one["status"] == 500]

        await eventually(has_failed, what="the first attempt")
    seen = await asyncio.to_thread(fleet_figures, fleet)
    # It waits for its next attempt, which is not due.
    assert seen["waiting"] == 1 and seen["oldest"] > 0 and seen["overdue"] == 0
    async with services.database.begin() as tx:
        await tx.connection.exec_driver_sql(
            "UPDATE webhook_deliveries SET due_at = '2020-01-01 00:00:00.000000'"
            f" WHERE webhook_id = '{webhook_id}'"
        )
    seen = await asyncio.to_thread(fleet_figures, fleet)
    assert seen["overdue"] > 24 * 3600
    async with gateway(fleet) as http:
        await eventually(lambda: len(receiver.received) == 2, what="a gateway to take it")
        assert (await http.delete(f"webhooks/{webhook_id}")).status_code == 204


@pytest.mark.extended
async def test_several_gateways_deliver_each_event_once_and_in_any_case(
    fleet: Fleet, services: Services, receiver: Receiver, chat_key: str
) -> None:
    texts = [f"text {number}" for number in range(60)]
    async with gateway(fleet) as http:
        webhook_id = await subscribe(http, receiver, f"{chat_key}*")
        # Nothing is lost while no gateway runs.
    await asyncio.gather(*(write(services, f"{chat_key}_{n}", *texts[n::4]) for n in range(4)))
    async with gateway(fleet) as http, gateway(fleet), gateway(fleet):
        await eventually(lambda: len(receiver.received) >= 60, what="all arrive")

        async def all_ended() -> bool:
            return not await deliveries(http, webhook_id, state="waiting")

        await eventually(all_ended, what="all are recorded")
        assert sorted(receiver.texts()) == sorted(texts)
        assert {one["attempts"] for one in await deliveries(http, webhook_id, limit=200)} == {1}


async def test_only_public_addresses_are_reached(
    fleet: Fleet, services: Services, receiver: Receiver, chat_key: str
) -> None:
    async with gateway(fleet, webhook_allow_private=()) as http:
        for url in (
            receiver.url,
            "http://localhost/",
            "http://[::1]/",
            "http://[::ffff:127.0.0.1]/",
            "http://169.254.169.254/latest/meta-data",
            "http://10.0.0.1/",
            "http://0.0.0.0/",
            "http://0x7f000001/",
            "http://2130706433/",
            "http://127.1/",
            "http://[64:ff9b::7f00:1]/",
            "file:///etc/passwd",
            "gopher://127.0.0.1/",
            "http://u:p@127.0.0.1/",
            "//127.0.0.1/",
            "",
        ):
            refused = await http.post("webhooks", json={"url": url})
            assert (refused.status_code, refused.json()["code"]) == (422, "invalid_request"), url
    async with gateway(fleet) as http:
        webhook_id = await subscribe(http, receiver, chat_key)
        for body in ({"events": []}, {"events": ["a b"]}, {"unknown": 1}, {"url": "x" * 3000}):
            refused = await http.patch(f"webhooks/{webhook_id}", json=body)
            assert refused.status_code == 422, body
    # The address is checked at each delivery, not only when the URL is given.
    async with gateway(fleet, webhook_allow_private=(), webhook_attempts=1) as http:
        await write(services, chat_key, "not allowed any more")

        async def is_dead() -> list[dict[str, Any]]:
            return await deliveries(http, webhook_id, state="dead")

        (dead,) = await eventually(is_dead, what="it is given up")
        assert "NEKRO_GATEWAY__WEBHOOK_ALLOW_PRIVATE" in dead["error"]
        assert receiver.received == []
