"""A page of another site that reads a chat with a stream ticket, in a real browser."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from gateway_process import GatewayProcess
from stream_server import StreamServer
from test_chat_site import TIMEOUT_MS, open_page
from waiting import WAIT_SECONDS
from worker_fleet import Fleet, build_fleet

from nekro.operations.actor import Scope
from nekro.operations.keys import new_key, store_key
from storage.engine import Database

pytestmark = pytest.mark.extended

FOLLOW = """url => { window.seen = []; window.source = new EventSource(url);
    source.addEventListener("message.received", event => seen.push(JSON.parse(event.data).data.text));
    return new Promise(resolve => source.onopen = resolve); }"""


@asynccontextmanager
async def other_site() -> AsyncIterator[str]:
    """Serve an empty page; yields its origin, which is of another site than a gateway's 127.0.0.1.

    It is a real server: browsers refuse loopback addresses to pages that are not from one.
    """

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: 3\r\n")
        writer.write(b"Connection: close\r\n\r\n<p>")
        await writer.drain()
        writer.close()

    async with StreamServer(answer) as server:
        yield f"http://localhost:{server.port}"


async def make_key(fleet: Fleet, *scopes: Scope) -> tuple[str, dict[str, str]]:
    """Store a key; returns its id and the header with it."""
    new, key = new_key("test", scopes=scopes)
    database = Database(fleet.settings.database, fleet.settings.data_dir)
    await store_key(database, new, by=None, request_id=None)
    await database.dispose()
    return new.id, {"Authorization": f"Bearer {key}"}


async def test_a_page_of_another_site_follows_a_chat_over_restarts_until_its_key_is_revoked(
    redis_server: Any, tmp_path: Path
) -> None:
    async with other_site() as site:
        await follow(redis_server, tmp_path, site)


async def follow(redis_server: Any, tmp_path: Path, site: str) -> None:
    fleet = await asyncio.to_thread(
        build_fleet,
        tmp_path,
        redis_server.url,
        f"sqlite:///{tmp_path / 'nekro.db'}",
        plugins={"dirs": (), "load_shipped": False},
        gateway={"cors_origins": (site,)},
    )
    _, operator = await make_key(fleet, *Scope)
    reader_id, reader = await make_key(fleet, Scope.READ)
    gateway = GatewayProcess(fleet)

    def start() -> None:
        gateway.start()
        gateway.wait_ready()

    await asyncio.to_thread(start)
    try:
        api = f"{gateway.url}/api/v1"

        def post(text: str) -> None:
            body = {"text": text, "user_id": "ada", "to_agent": False}
            httpx.post(
                f"{api}/chats/web-1/messages", json=body, headers=operator, timeout=WAIT_SECONDS
            ).raise_for_status()

        async with open_page("about:blank") as page:
            await page.goto(f"{site}/")
            # What the site's server does for its page.
            asked = httpx.post(
                f"{api}/stream-tickets", json={"chat_key": "web-1"}, headers=reader, timeout=WAIT_SECONDS
            )
            await asyncio.wait_for(page.evaluate(FOLLOW, gateway.url + asked.json()["path"]), WAIT_SECONDS)
            for number, end in enumerate((None, gateway.kill, gateway.stop), start=1):
                if end is not None:
                    await asyncio.to_thread(end)
                    await asyncio.to_thread(start)
                post(f"note {number}")
                await page.wait_for_function(f"seen.length == {number}", timeout=TIMEOUT_MS)
            assert await page.evaluate("seen") == ["note 1", "note 2", "note 3"]
            httpx.delete(f"{api}/keys/{reader_id}", headers=operator).raise_for_status()
            await asyncio.to_thread(gateway.kill)
            await asyncio.to_thread(start)
            # The browser does not try again after a refusal: the page must ask for another ticket.
            await page.wait_for_function("source.readyState == EventSource.CLOSED", timeout=TIMEOUT_MS)
    finally:
        gateway.kill()
