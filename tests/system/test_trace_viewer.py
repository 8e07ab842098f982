"""A real turn in Phoenix, a viewer of GenAI traces: it understands tokens, models and tools of our spans.

``make trace-viewer`` installs Phoenix; the browser needs Playwright (`pip install nekro-workers[browser]`)
and a Chromium. The screenshot stays in ``artifacts/traces``; ``docs/images/turn-trace.png`` is one of them.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from chat_server import SceneServer, stream
from redis_process import free_port
from waiting import WAIT_SECONDS, eventually, wait_until

from nekro.app import use_cases
from nekro.broker.tracing import TurnTrace
from storage.states import TriggerKind

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

ARTIFACTS = Path(__file__).parents[2] / "artifacts" / "traces"
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
PHOENIX = Path(os.environ.get("TRACE_VIEWER_DIR") or CACHE / "nekro-trace-viewer") / "bin" / "phoenix"
BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
KEY = "sk-of-the-model-endpoint"
FIRST = "The lighthouse first.\n```python\nremember('Ada asks')\nprint(add(2, 3))\nlook_up('lighthouse')\n```"
SECOND = "```python\nsend_msg_text(_ck, 'It is 42 m high.')\n```"

SPANS = """query ($trace: String!) { getTraceByOtelId(traceId: $trace) { spans(first: 100) { edges { node {
  name spanKind statusCode tokenCountPrompt tokenCountCompletion attributes context { spanId } parentId
} } } } }"""


@pytest.fixture(scope="module")
def database_url(sqlite_url: str) -> str:
    """One kind of database suffices here."""
    return sqlite_url


@pytest.fixture(scope="module")
def phoenix(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Phoenix on loopback; its URL."""
    if not PHOENIX.exists():
        pytest.skip("no Phoenix: make trace-viewer")
    directory, port = tmp_path_factory.mktemp("phoenix"), free_port()
    url = f"http://127.0.0.1:{port}"
    with (directory / "log.txt").open("wb") as log:
        process = subprocess.Popen(
            [PHOENIX, "serve"],
            env={
                "PATH": os.environ["PATH"],
                "HOME": str(directory),
                "PHOENIX_WORKING_DIR": str(directory),
                "PHOENIX_HOST": "127.0.0.1",
                "PHOENIX_PORT": str(port),
                "PHOENIX_GRPC_PORT": str(free_port()),
                "PHOENIX_TELEMETRY_ENABLED": "false",
                "PHOENIX_ALLOW_EXTERNAL_RESOURCES": "false",
            },
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
        )

    def answers() -> bool:
        assert process.poll() is None, (directory / "log.txt").read_text()
        try:
            return httpx.get(f"{url}/healthz", timeout=WAIT_SECONDS).status_code == 200
        except httpx.TransportError:
            return False

    try:
        wait_until(answers, what="Phoenix")
        yield url
    finally:
        process.terminate()
        process.wait(WAIT_SECONDS)


@pytest.fixture(scope="module")
def model() -> Iterator[str]:
    server = SceneServer({"tower": [stream("", FIRST), stream("", SECOND)]})
    yield server.start()
    server.stop()


@pytest.fixture(scope="module")
def fleet(make_fleet: Callable[..., Any], phoenix: str, model: str) -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", phoenix)
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
        system = make_fleet(
            llm={
                "base_url": model,
                "model": "gpt-5-mini",
                "api_key": KEY,
                "input_price_per_million": 0.25,
                "output_price_per_million": 2,
            },
            tracing={"enabled": True, "capture_content": True},
            agent={"debounce_seconds": 0},
        )
        system.start("methods", "rounds")
        yield system
        system.stop()  # stops before Phoenix


@pytest.fixture(scope="module")
def trace_id(fleet: Any) -> str:
    """The trace of a turn of two rounds, which a person's message begins."""
    return asyncio.run(begin_turn(fleet))


async def begin_turn(fleet: Any) -> str:
    services = fleet.services()
    await services.start()
    try:
        text = f"scene:tower How high is the lighthouse? My key is {KEY}"
        message_id = await use_cases.receive_message(services, "harbour", text, user_id="u1", user_name="Ada")
        async with services.database.read() as transaction:
            first = await transaction.rounds.find_by_trigger(TriggerKind.MESSAGE, message_id)
    finally:
        await services.close()
    assert first is not None
    return f"{TurnTrace(turn_id=first.id, root_turn_id=first.id).trace_id:032x}"


async def spans_of(phoenix: str, trace_id: str) -> list[dict[str, Any]]:
    """The spans as Phoenix shows them, once the span of the whole turn has arrived."""
    async with httpx.AsyncClient(base_url=phoenix, timeout=WAIT_SECONDS) as client:

        async def read() -> list[dict[str, Any]]:
            body = {"query": SPANS, "variables": {"trace": trace_id}}
            answer = (await client.post("/graphql", json=body)).json()
            assert "errors" not in answer, answer
            trace = answer["data"]["getTraceByOtelId"]
            found = [edge["node"] for edge in trace["spans"]["edges"]] if trace else []
            names = [span["name"] for span in found]
            is_whole = "invoke_agent nekro" in names and names.count("round") == 2
            return found if is_whole and "run tests.probe.look_up" in names else []

        found: list[dict[str, Any]] = await eventually(read, what="the turn in Phoenix")
        return found


async def test_phoenix_understands_the_agent_its_models_tokens_and_tools(phoenix: str, trace_id: str) -> None:
    spans = await spans_of(phoenix, trace_id)
    kinds = {(span["name"], span["spanKind"]) for span in spans}
    assert {
        ("invoke_agent nekro", "agent"),
        ("chat gpt-5-mini", "llm"),
        ("execute_tool tests.probe.add", "tool"),
        ("execute_tool tests.probe.remember", "tool"),
        ("execute_tool tests.probe.look_up", "tool"),
    } <= kinds
    asked = [span for span in spans if span["spanKind"] == "llm"]
    assert [(span["tokenCountPrompt"], span["tokenCountCompletion"]) for span in asked] == [(1000, 200)] * 2
    attributes = json.loads(asked[0]["attributes"])
    assert attributes["llm"]["model_name"] == "gpt-5-mini" and attributes["session"]["id"] == "harbour"
    shown = [message["message"]["role"] for message in attributes["llm"]["input_messages"]]
    assert shown[0] == "system" and "user" in shown
    (added,) = [span for span in spans if span["name"] == "execute_tool tests.probe.add"]
    tool = json.loads(added["attributes"])
    assert tool["tool"]["name"] == "tests.probe.add" and "2" in str(tool["tool"]["parameters"])
    assert tool["output"]["value"]
    assert KEY not in json.dumps(spans)


async def test_the_page_of_the_turn_shows_its_rounds(phoenix: str, trace_id: str) -> None:
    playwright = pytest.importorskip("playwright.async_api", reason="pip install nekro-workers[browser]")
    if BROWSER is None:
        pytest.skip("no Chromium: apt-get install chromium")
    await spans_of(phoenix, trace_id)
    ARTIFACTS.mkdir(parents=True, exist_ok=True)
    async with playwright.async_playwright() as driver:
        browser = await driver.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        page = await browser.new_page(viewport={"width": 1400, "height": 860})
        await page.goto(f"{phoenix}/redirects/traces/{trace_id}")
        expected = playwright.expect
        asked = page.get_by_text("chat gpt-5-mini")
        await expected(asked).to_have_count(2, timeout=60_000)
        await expected(page.get_by_text("execute_tool tests.probe.look_up").first).to_be_visible()
        await asked.first.click()
        await expected(page.get_by_text("How high is the lighthouse").first).to_be_visible(timeout=60_000)
        text = await page.inner_text("body")
        await page.screenshot(path=ARTIFACTS / "turn.png")
        await browser.close()
    assert "invoke_agent nekro" in text and "2,400" in text.replace(".", ",")
    assert KEY not in text and "[secret]" in text
