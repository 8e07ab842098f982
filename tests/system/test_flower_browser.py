"""Flower in a real browser on a busy system; the screenshots stay in ``artifacts/flower``.

Needs Playwright (`pip install nekro-workers[browser]`) and a Chromium on the machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from redis_process import free_port
from waiting import WAIT_SECONDS

from nekro.app import use_cases
from nekro.app.services import Services
from nekro.cli.environment import environment_of
from nekro_agent.errors import NekroError

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

HERE = Path(__file__).parent
ARTIFACTS = HERE.parents[1] / "artifacts" / "flower"
USER, PASSWORD = "operator", "of operators"
BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.fixture(scope="module")
def database_url(sqlite_url: str) -> str:
    """One kind of database suffices here."""
    return sqlite_url


@pytest.fixture(scope="module")
def fleet(make_fleet: Callable[..., Any]) -> Any:
    return make_fleet(
        plugins={"dirs": (HERE / "plugins", HERE / "slow_plugins")},
        workers={"long_methods": ("tests.slow.*",), "drain_seconds": 1},
    )


@pytest.fixture(scope="module")
def flower_url(fleet: Any) -> Iterator[str]:
    port = free_port()
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "nekro.cli.main", "flower", "--port", str(port)],
        env={**environment_of(fleet.settings), "FLOWER_BASIC_AUTH": f"{USER}:{PASSWORD}"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        fleet.start("methods", "methods", "long")
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(20)


class Busy:
    """Calls of every kind, until it is closed."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Busy:
        await self._services.start()
        for method, argument in (
            ("journal", 1), ("length", b"told in confidence"), ("fail_with", "it broke"), ("wait_long", 30),
            ("fetch_long", 30),
        ):  # fmt: skip
            self._tasks += [asyncio.create_task(self._call(method, argument)) for _ in range(2)]
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._services.close()

    async def _call(self, method: str, argument: object) -> None:
        while True:
            with contextlib.suppress(NekroError):
                await use_cases.invoke(
                    self._services, method, (argument,), {}, chat_key="busy", user_id="u", timeout_seconds=60
                )
            await asyncio.sleep(0.2)


async def test_flower_shows_a_busy_system_in_a_browser(fleet: Any, flower_url: str) -> None:
    playwright = pytest.importorskip("playwright.async_api", reason="pip install nekro-workers[browser]")
    if BROWSER is None:
        pytest.skip("no Chromium: apt-get install chromium")
    ARTIFACTS.mkdir(parents=True, exist_ok=True)
    async with Busy(fleet.services()), playwright.async_playwright() as driver:
        browser = await driver.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        context = await browser.new_context(
            viewport={"width": 1500, "height": 900},
            http_credentials={"username": USER, "password": PASSWORD},
        )
        page = await context.new_page()
        await shows(page, f"{flower_url}/workers", "methods-0", "methods-1", "long-2")
        await page.screenshot(path=ARTIFACTS / "workers.png")
        await page.close()  # it keeps polling
        page = await context.new_page()
        await shows(page, f"{flower_url}/tasks", "tests.probe.journal", "fail_with")
        await page.screenshot(path=ARTIFACTS / "tasks.png")
        assert "in confidence" not in await page.content()
        row = page.locator("tbody tr", has_text="fail_with").first
        failed = await row.locator("a[href*='/task/']").first.get_attribute("href")
        await shows(page, f"{flower_url}{failed}", "it broke", "in fail_with", "(hidden)")
        await page.screenshot(path=ARTIFACTS / "failure.png", full_page=True)
        async with httpx.AsyncClient(auth=(USER, PASSWORD), timeout=WAIT_SECONDS) as client:
            found = await client.get(f"{flower_url}/api/tasks?taskname=tests.slow.fetch_long&limit=1")
        (fetching,) = found.json()
        await shows(page, f"{flower_url}/task/{fetching}", "tests.slow.fetch_long", "PROGRESS", "42 %")
        await page.screenshot(path=ARTIFACTS / "progress.png", full_page=True)
        await shows(page, f"{flower_url}/workers", "methods-0")
        worker = page.locator("a", has_text="methods-0").first
        href = await worker.get_attribute("href")
        await shows(page, f"{flower_url}{href}", "AsyncioPool")
        await page.screenshot(path=ARTIFACTS / "worker.png", full_page=True)
        await browser.close()


async def shows(page: Any, url: str, *texts: str) -> None:
    """Reload a page until it shows every text."""
    content = ""
    for _ in range(12):
        with contextlib.suppress(Exception):  # Flower is starting: the browser raises its own errors for that
            await page.goto(url, wait_until="domcontentloaded", timeout=15_000)
            # Its tables fetch their rows after the page.
            await asyncio.sleep(1.5)
            content = await page.content()
        if all(text in content for text in texts):
            return
    await page.screenshot(path=ARTIFACTS / "unexpected.png")
    pytest.fail(f"{url} does not show {[text for text in texts if text not in content]}")
