"""The OpenAI-compatible API with clients from npm: ``openai``, LangChain and the AI SDK.

``make openai-clients`` installs them. LibreChat asks by LangChain, Cherry Studio by the AI SDK.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from gateway_server import served
from key_ring import make_key
from painter_model import PIXEL, PainterModel
from waiting import WAIT_SECONDS
from worker_fleet import Fleet

from nekro.gateway.app import create_app

pytestmark = pytest.mark.extended

SCRIPT = Path(__file__).with_name("openai_clients.cjs")
MODULES = Path(__file__).resolve().parents[2] / ".openai-clients" / "node_modules"
DATA_URL = "data:image/png;base64," + base64.b64encode(PIXEL).decode()
HELLO = "Hello!\n\nHow are you?"
#: In responses each message is an item of its own.
ITEMS = "Hello!How are you?"


@pytest.fixture(scope="module")
def database_url(sqlite_url: str) -> str:
    """One kind of database: no outcome depends on it."""
    return sqlite_url


@pytest.fixture(scope="module")
def agents(make_fleet: Callable[..., Fleet]) -> Iterator[Fleet]:
    model = PainterModel()
    fleet = make_fleet(llm={"base_url": model.start(), "model": "m", "stream": False, "tries": 1})
    fleet.start("methods", "rounds")
    yield fleet
    model.stop()


async def answers_of(url: str, key: str) -> dict[str, Any]:
    """What the script prints."""
    node = shutil.which("node")
    if node is None or not MODULES.is_dir():
        pytest.skip("the clients are not installed; they need node and make openai-clients")
    process = await asyncio.create_subprocess_exec(
        node, str(SCRIPT), url, DATA_URL,
        env={"PATH": os.environ["PATH"], "NODE_PATH": str(MODULES), "NEKRO_KEY": key},
        stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    output, _ = await asyncio.wait_for(process.communicate(), WAIT_SECONDS * 5)
    assert process.returncode == 0
    answers: dict[str, Any] = json.loads(output)
    return answers


async def test_clients_from_npm_work_unchanged(agents: Fleet) -> None:
    key = await asyncio.to_thread(make_key, agents.settings)
    async with served(create_app(agents.settings)) as http:
        answers = await answers_of(f"{http.base_url}/v1", key)
    assert "POST /v1/embeddings: nothing is served there" in answers["unknown"][2]
    refused = {
        name: (kind, status)
        for name, (kind, status, _) in ((name, answers.pop(name)) for name in (
            "demanded", "failed", "failed_stream", "unknown", "wrong_key",
        ))
    }  # fmt: skip
    assert answers == {
        "models": ["nekro"],
        "plain": HELLO,
        "streamed": HELLO,
        "picture": "I see 1: data:image/png;base64",
        "responses": [ITEMS, "I see 1: data:image/png;base64"],
        "responses_streamed": ITEMS,
        "langchain": HELLO,
        "langchain_streamed": HELLO,
        "langchain_responses": ITEMS,
        "ai_sdk": HELLO,
        "ai_sdk_streamed": HELLO,
    }
    assert refused == {
        "demanded": ("BadRequestError", 400),
        "failed": ("InternalServerError", 502),
        "failed_stream": ("APIError", None),
        "unknown": ("NotFoundError", 404),
        "wrong_key": ("AuthenticationError", 401),
    }
