"""The example application and browsers' own event streams, in a real browser, while the gateway restarts."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from gateway_process import GatewayProcess
from redis_process import free_port
from waiting import WAIT_SECONDS, wait_until
from worker_fleet import Fleet

pytestmark = pytest.mark.extended

ROOT = Path(__file__).parent.parent.parent
SITE = ROOT / "examples" / "chat_site"
BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
TIMEOUT_MS = 30_000


@pytest.fixture
def gateway(fleet: Fleet) -> Iterator[GatewayProcess]:
    """A gateway on a port that it keeps when it is started again."""
    with GatewayProcess(fleet) as gateway:
        yield gateway


@pytest.fixture
def site(fleet: Fleet, gateway: GatewayProcess, tmp_path: Path) -> Iterator[str]:
    """The example application in front of the gateway; yields its URL."""
    port = free_port()
    clean = {name: value for name, value in os.environ.items() if not name.startswith("NEKRO_")}
    command = [sys.executable, "-m", "uvicorn", "app:app", "--app-dir", str(SITE), "--port", str(port)]
    variables = {"NEKRO_URL": gateway.url, "NEKRO_DATA_DIR": str(fleet.settings.data_dir)}
    with (tmp_path / "site.log").open("wb") as log:
        process = subprocess.Popen(command, env={**clean, **variables}, stdout=log, stderr=subprocess.STDOUT)
    url = f"http://127.0.0.1:{port}"
    try:
        wait_until(lambda: answers(url), what=lambda: (tmp_path / "site.log").read_text())
        yield url
    finally:
        process.kill()
        process.wait()


def answers(url: str) -> bool:
    try:
        return httpx.get(url).is_success
    except httpx.TransportError:
        return False


@asynccontextmanager
async def open_page(url: str) -> AsyncIterator[Any]:
    """A page in Chromium."""
    playwright = pytest.importorskip("playwright.async_api", reason="pip install nekro-workers[browser]")
    if BROWSER is None:
        pytest.skip("no Chromium: apt-get install chromium")
    async with playwright.async_playwright() as driver:
        browser = await driver.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        try:
            page = await browser.new_page()
            await page.goto(url)
            yield page
        finally:
            await browser.close()


async def test_the_example_has_a_conversation_while_its_gateway_restarts(
    site: str, gateway: GatewayProcess
) -> None:
    async with open_page(site) as page:
        await page.fill("#text", "say hello")
        await page.click("button")
        await page.wait_for_selector("li.sent:has-text('you said hello')", timeout=TIMEOUT_MS)
        gateway.kill()
        await page.fill("#text", "say again")
        await page.click("button")
        gateway.start()
        await asyncio.to_thread(gateway.wait_ready)
        await page.wait_for_selector("li.sent:has-text('you said again')", timeout=TIMEOUT_MS)
        shown = await page.eval_on_selector_all("li", "items => items.map(i => [i.className, i.textContent])")
        numbers = await page.eval_on_selector_all("li", "items => items.map(i => +i.dataset.number)")
    assert shown == [
        ["received", "say hello"],
        ["sent", "you said hello"],
        ["received", "say again"],
        ["sent", "you said again"],
    ]
    assert numbers == sorted(set(numbers))


async def test_a_browsers_event_source_goes_on_after_the_gateway_was_restarted(
    gateway: GatewayProcess,
) -> None:
    # An event source of a browser sends no key.
    asked = httpx.post(
        f"{gateway.url}/api/v1/stream-tickets", json={"chat_key": "browser"}, headers=gateway.headers
    )
    path = asked.raise_for_status().json()["path"]
    script = """path => { window.seen = []; const source = new EventSource(path);
        const keep = event => window.seen.push(parseInt(event.lastEventId));
        for (const type of ["message", "message.received"]) source.addEventListener(type, keep);
        return new Promise(resolve => source.onopen = resolve); }"""

    def post(number: int) -> None:
        body = {"text": f"note {number}", "user_id": "ada", "to_agent": False}
        httpx.post(
            f"{gateway.url}/api/v1/chats/browser/messages",
            json=body, headers=gateway.headers, timeout=WAIT_SECONDS,
        ).raise_for_status()  # fmt: skip

    async with open_page("about:blank") as page:
        # A page of the same origin; those of the gateway themselves allow no scripts.
        await page.route("**/page", lambda route: route.fulfill(body="<p>", content_type="text/html"))
        await page.goto(f"{gateway.url}/page")
        await asyncio.wait_for(page.evaluate(script, path), WAIT_SECONDS)
        post(1)
        await page.wait_for_function("window.seen.length == 1", timeout=TIMEOUT_MS)
        gateway.kill()
        gateway.start()
        await asyncio.to_thread(gateway.wait_ready)
        post(2)
        await page.wait_for_function("window.seen.length == 2", timeout=TIMEOUT_MS)
        gateway.stop(signal.SIGTERM)
        gateway.start()
        await asyncio.to_thread(gateway.wait_ready)
        post(3)
        await page.wait_for_function("window.seen.length == 3", timeout=TIMEOUT_MS)
        assert await page.evaluate("window.seen") == [1, 2, 3]


def test_the_example_has_at_most_a_hundred_lines() -> None:
    assert sum(len(path.read_text("utf-8").splitlines()) for path in SITE.iterdir() if path.is_file()) <= 100
