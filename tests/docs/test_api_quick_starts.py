"""The quick starts of ``docs/api.md`` run as they stand, on a fleet with a gateway."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from api_fleet import small_fleet
from gateway_process import GatewayProcess
from worker_fleet import Fleet

pytestmark = pytest.mark.extended

ROOT = Path(__file__).parent.parent.parent

TEXT = (ROOT / "docs" / "api.md").read_text("utf-8")
BLOCKS = dict(re.findall(r"^## (With .+?|Run code)\n.*?^```\w+\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE))
RECIPES = TEXT.partition("\n## Recipes with curl\n")[2].partition("\n## ")[0]

#: The methods of the reader's own that the recipes name.
SHOP = '''
import asyncio

from nekro_agent.api.plugin import AsyncTaskHandle, NekroPlugin, SandboxMethodType, TaskCtl, task
from nekro_agent.api.schemas import AgentCtx

plugin = NekroPlugin("Shop", "shop", "Sells", "1.0", "tests", "")


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "pay", requires_approval=True)
async def pay(_ctx: AgentCtx, amount: int) -> str:
    """Pay."""
    return f"paid {amount}"


@plugin.mount_async_task("haul")
async def haul_slowly(handle: AsyncTaskHandle):
    """Last until it is cancelled."""
    yield TaskCtl.report_progress("half way", 50)
    await asyncio.Event().wait()


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "haul")
async def haul(_ctx: AgentCtx) -> None:
    """Begin a job."""
    await task.start("haul", "1", _ctx.chat_key, plugin)
'''


@pytest.fixture(scope="module")
def fleet(redis_server: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Workers of the lanes that a turn needs, with the methods that each system has."""
    yield from small_fleet(
        tmp_path_factory.mktemp("fleet"),
        redis_server.url,
        load_shipped=True,
        more_plugins={"shop": SHOP},
        lanes=("methods", "rounds", "long"),
        gateway={"webhook_allow_private": ("127.0.0.1",)},
    )


@pytest.fixture(scope="module")
def url(fleet: Fleet) -> Iterator[str]:
    """A gateway of the fleet, whose local key the examples find."""
    with GatewayProcess(fleet) as gateway, pytest.MonkeyPatch.context() as patch:
        patch.setenv("NEKRO_DATA_DIR", str(fleet.settings.data_dir))
        yield gateway.url


def run(url: str, name: str, *command: str, **variables: str) -> str:
    return run_source(url, BLOCKS[name], *command, **variables)


def run_source(url: str, source: str, *command: str, **variables: str) -> str:
    known = {"NEKRO_DATA_DIR": os.environ["NEKRO_DATA_DIR"]} if "NEKRO_DATA_DIR" in os.environ else {}
    source = source.replace("http://127.0.0.1:8600", url)
    clean = {
        key: value
        for key, value in os.environ.items()
        if key == "NEKRO_DATA_DIR" or not key.startswith(("NEKRO_", "OPENAI_"))
    }
    done = subprocess.run(
        [*command, source],
        cwd=ROOT,
        env={**clean, **known, **variables},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_page_has_each_quick_start() -> None:
    assert list(BLOCKS) == ["With curl", "With the client", "Run code", "With the openai package"]


def test_the_quick_start_with_curl(url: str) -> None:
    if shutil.which("curl") is None:
        pytest.skip("no curl")
    out = run(url, "With curl", "bash", "-euc")
    assert '"you said hello"' in out and "Note 'Shopping' saved as 'shop'" in out
    assert '"path":"/app/uploads/README.md"' in out
    assert "event: turn.ended" in out and '"status"' not in out


def test_the_quick_start_with_the_client(url: str) -> None:
    out = run(url, "With the client", sys.executable, "-c")
    assert out.startswith("['you said hello']\n") and out.endswith("turn.ended\n")


def test_code_runs_as_documented(url: str) -> None:
    run(url, "With curl", "bash", "-euc")  # saves the note
    assert run(url, "Run code", sys.executable, "-c", NEKRO_URL=url) == "{'shop': 'Shopping'}\n"


def test_the_quick_start_with_the_openai_package(fleet: Fleet) -> None:
    created = fleet.run("keys", "create", "quick", "--scope", "read", "--scope", "post")
    name, key = "With the openai package", created.stdout.strip()
    try:
        with GatewayProcess(fleet) as gateway:
            assert run(gateway.url, name, sys.executable, "-c", NEKRO_KEY=key) == "you said hello\n"
    finally:
        fleet.run("keys", "revoke", key.split("_")[1])


class Hook(BaseHTTPRequestHandler):
    """Takes each delivery."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(204)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def hook() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Hook) as server:
        Thread(target=server.serve_forever).start()
        yield f"http://127.0.0.1:{server.server_port}/hooks/nekro"
        server.shutdown()


def test_the_recipes_run_one_after_the_other(url: str, hook: str) -> None:
    if not (shutil.which("curl") and shutil.which("jq")):
        pytest.skip("no curl, or no jq")
    blocks = re.findall(r"^```bash\n(.*?)^```", RECIPES, re.DOTALL | re.MULTILINE)
    titles = re.findall(r"^\*\*(.+?)\.\*\*", RECIPES, re.MULTILINE)
    assert titles == ["A picture in", "A webhook out", "An approval", "A job", "Cancel a turn"]
    source = "\necho ---\n".join(blocks).replace("https://shop.example/hooks/nekro", hook)
    shell = ("bash", "-euo", "pipefail", "-c")
    expected = (
        "",
        r'.*"media_type": "image/png".*"you said received"\n',
        r'done\n(\["turn.ended","(waiting|done)",[01]\]\n)*',
        r"tests\.shop\.pay\(5\)\npending\napproved\n",
        r'done\n\["\S*haul","(queued|running)"\]\n[0-9a-f]{32}\n',
        r"[0-9a-f]{32}\n(cancelled|running|waiting)\n",
    )
    shown = run_source(url, source, *shell).split("---\n")
    assert len(shown) == len(expected)
    for text, pattern in zip(shown, expected, strict=True):
        assert re.fullmatch(pattern, text, re.DOTALL), shown
