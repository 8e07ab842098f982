"""A stock chat front end from PyPI, unchanged, on the OpenAI-compatible API, in a real browser.

The front end is gradio's ``load_chat``. It is installed outside of this project's constraints: in the
interpreter that ``NEKRO_TEST_GRADIO_PYTHON`` names, else with pip into a directory of the test run.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from gateway_server import served
from key_ring import make_key
from painter_model import PIXEL, PainterModel
from redis_process import free_port
from waiting import WAIT_SECONDS, wait_until
from worker_fleet import build_fleet

from nekro.gateway.app import create_app

pytestmark = pytest.mark.slow

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
_FRONT_END = """
import sys, gradio
base_url, key, port = sys.argv[1:]
chat = gradio.load_chat(base_url, model="nekro", token=key, file_types="image", streaming=True)
chat.launch(server_name="127.0.0.1", server_port=int(port))
"""
_BROWSER_MILLISECONDS = WAIT_SECONDS * 1000


@pytest.fixture(scope="module")
def gradio_python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An interpreter that has gradio."""
    named = os.environ.get("NEKRO_TEST_GRADIO_PYTHON")
    if named:
        return named
    directory = tmp_path_factory.mktemp("gradio")
    subprocess.run([sys.executable, "-m", "venv", str(directory)], check=True)
    python = str(directory / "bin" / "python")
    installed = subprocess.run(
        [python, "-m", "pip", "install", "--quiet", "gradio", "openai"], capture_output=True, text=True
    )
    if installed.returncode:
        pytest.skip("gradio cannot be installed: pip install gradio, or NEKRO_TEST_GRADIO_PYTHON")
    return python


@pytest.fixture
def artefacts(tmp_path: Path) -> Path:
    """Directory of the screenshots."""
    directory = Path(os.environ.get("NEKRO_TEST_ARTEFACTS") or tmp_path / "artefacts")
    directory.mkdir(parents=True, exist_ok=True)
    return directory


class FrontEnd:
    """The front end as a process."""

    def __init__(self, python: str, base_url: str, key: str, directory: Path) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self._log = directory / "gradio.log"
        environment = {
            "PATH": os.environ["PATH"],
            "HOME": str(directory),
            "GRADIO_ANALYTICS_ENABLED": "False",
            "GRADIO_TEMP_DIR": str(directory / "uploads"),
        }
        with self._log.open("ab") as output:
            self._process = subprocess.Popen(
                [python, "-c", _FRONT_END, base_url, key, str(port)],
                env=environment,
                cwd=directory,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def wait_ready(self) -> None:
        """Wait until it serves its page."""
        wait_until(self._answers, what=lambda: f"the front end:\n{self._log.read_text()}")

    def stop(self) -> None:
        """End it."""
        self._process.terminate()
        self._process.wait(WAIT_SECONDS)

    def _answers(self) -> bool:
        assert self._process.poll() is None, self._log.read_text()
        try:
            return httpx.get(self.url).status_code == 200
        except httpx.HTTPError:
            return False


@pytest.fixture
def model() -> Iterator[PainterModel]:
    model = PainterModel()
    yield model
    model.stop()


@pytest.mark.timeout(600)
async def test_a_stock_front_end_holds_a_conversation_with_a_picture(
    redis_server: Any, gradio_python: str, model: PainterModel, tmp_path: Path, artefacts: Path
) -> None:
    playwright = pytest.importorskip("playwright.async_api", reason="pip install nekro-workers[browser]")
    if BROWSER is None:
        pytest.skip("no Chromium: apt-get install chromium")
    (tmp_path / "cat.png").write_bytes(PIXEL)
    llm = {"base_url": model.start(), "model": "tests-1", "stream": False}
    fleet = await asyncio.to_thread(
        build_fleet, tmp_path, redis_server.url, f"sqlite:///{tmp_path / 'nekro.db'}", llm=llm
    )
    key = await asyncio.to_thread(make_key, fleet.settings)
    front_end = None
    try:
        await asyncio.to_thread(fleet.start, "methods", "rounds")
        async with served(create_app(fleet.settings)) as client:
            await client.get("/healthz", timeout=WAIT_SECONDS)  # answered when the services have started
            front_end = FrontEnd(gradio_python, f"{client.base_url}/v1", key, tmp_path)
            await asyncio.to_thread(front_end.wait_ready)
            async with playwright.async_playwright() as driver:
                browser = await driver.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
                try:
                    page = await browser.new_page()
                    page.set_default_timeout(_BROWSER_MILLISECONDS)
                    await _talk(page, front_end.url, tmp_path / "cat.png", artefacts)
                finally:
                    await browser.close()
    finally:
        if front_end is not None:
            await asyncio.to_thread(front_end.stop)
        await asyncio.to_thread(fleet.stop)
    shown = sorted(path.name for path in artefacts.iterdir())
    assert shown[:3] == ["1-question.png", "2-seen.png", "3-drawn.png"]


async def _talk(page: Any, url: str, picture: Path, artefacts: Path) -> None:
    await page.goto(url)
    box = page.locator("textarea").first
    await page.locator("input[type=file]").first.set_input_files(str(picture))
    await page.locator(".thumbnail-item, .thumbnail-image").first.wait_for()
    await box.fill("What is this? scene:look")
    await page.screenshot(path=str(artefacts / "1-question.png"))
    await box.press("Enter")
    await page.get_by_text("I see 1: data:image/png;base64").wait_for()
    await page.screenshot(path=str(artefacts / "2-seen.png"))
    await box.fill("Now paint one. scene:draw")
    await box.press("Enter")
    await page.get_by_text("Here it is.").wait_for()
    drawn = page.locator("img[src*='/links/']")
    await drawn.wait_for(state="attached")
    await page.wait_for_function(
        "() => [...document.querySelectorAll(\"img[src*='/links/']\")].some(i => i.naturalWidth === 1)"
    )
    await page.screenshot(path=str(artefacts / "3-drawn.png"))
