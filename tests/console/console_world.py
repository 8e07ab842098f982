"""A system with a console in a real browser, for the tests of the console and its pictures."""

from __future__ import annotations

import contextlib
import json
import shutil
import sqlite3
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

import httpx
import pytest
from code_model import CodeModel
from gateway_process import GatewayProcess
from key_ring import make_key
from sqlalchemy import make_url
from waiting import WAIT_SECONDS, wait_until
from worker_fleet import Fleet, build_fleet

from nekro.operations.actor import Scope

__all__ = ["DESKTOP", "LOOKS", "PHONE", "Console", "Watched", "axe_script", "axe_violations", "open_console"]

PLUGINS: Final = Path(__file__).parent / "plugins"
BROWSER: Final = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
DESKTOP: Final = {"width": 1280, "height": 860}
PHONE: Final = {"width": 360, "height": 740}
#: Widths and themes of pages: two show each width and each theme; `make console-pictures` takes all four.
LOOKS: Final = [
    (1280, "light"),
    (360, "dark"),
    pytest.param(1280, "dark", marks=pytest.mark.slow),
    pytest.param(360, "light", marks=pytest.mark.slow),
]
_ROOT: Final = Path(__file__).parents[2]
#: Of each wait for a page.
_BROWSER_MILLISECONDS: Final = WAIT_SECONDS * 1000
#: Runs before any script of a page: counts what the page's policy refused.
_WATCH: Final = """
window.__refused = [];
addEventListener("securitypolicyviolation", event =>
  window.__refused.push(`${event.violatedDirective} ${event.blockedURI} ${event.sample}`));
"""


class Watched:
    """A page of the browser; records what must not happen in it."""

    def __init__(self, page: Any, console: Console) -> None:
        self.page, self._console = page, console
        #: Errors of scripts, dialogs, and requests to other hosts.
        self.faults: list[str] = []
        page.set_default_timeout(_BROWSER_MILLISECONDS)
        page.on("pageerror", lambda error: self.faults.append(f"error: {error}"))
        page.on("dialog", self._dialog)
        page.on("popup", lambda popup: self.faults.append(f"popup: {popup.url}"))
        page.on("request", self._request)

    def go(self, address: str) -> Any:
        """Go to a page by its address (``#/chats``), and wait until it is shown."""
        if self.page.url.startswith(self._console.url):
            self.page.evaluate("address => { location.hash = address }", address)
        else:
            self.page.goto(f"{self._console.url}/console/{address}")
        self.page.wait_for_function(
            "address => decodeURIComponent(location.hash) === decodeURIComponent(address)"
            " || location.hash.startsWith('#/login')",
            arg=address,
        )
        self.shown()
        return self.page

    def shown(self) -> None:
        """Wait until the page is complete."""
        self.page.locator("main h1").first.wait_for()
        self.page.wait_for_function("() => !document.querySelector('main .loading')")

    def check(self) -> None:
        """Fail if something happened that must not."""
        assert self.faults == []
        assert self.page.evaluate("window.__refused") == []

    def _dialog(self, dialog: Any) -> None:
        self.faults.append(f"dialog: {dialog.message}")
        dialog.dismiss()

    def _request(self, request: Any) -> None:
        if not request.url.startswith((f"{self._console.url}/", "blob:")):
            self.faults.append(f"request: {request.url}")


class Console:
    """A fleet, a gateway and a browser."""

    def __init__(
        self, fleet: Fleet, gateway: GatewayProcess, browser: Any, model: CodeModel, key: str
    ) -> None:
        self.fleet, self.gateway, self.browser, self.model, self.key = fleet, gateway, browser, model, key
        self.url = gateway.url
        self.http = httpx.Client(
            base_url=f"{gateway.url}/api/v1/",
            headers={"Authorization": f"Bearer {key}"},
            timeout=WAIT_SECONDS,
            verify=False,
        )
        self._state: Any = None

    @contextlib.contextmanager
    def window(
        self, *, size: dict[str, int] = DESKTOP, theme: str = "light", **options: Any
    ) -> Iterator[Watched]:
        """Open a window that is logged in."""
        context = self.browser.new_context(
            viewport=size,
            color_scheme=theme,
            storage_state=self._logged_in(),
            reduced_motion="reduce",
            **options,
        )
        context.add_init_script(_WATCH)
        try:
            yield Watched(context.new_page(), self)
        finally:
            context.close()

    def say(self, chat_key: str, text: str, *code: str, wait: float = 0) -> str:
        """Post a message whose turn runs the code, a round per piece; returns the turn's id."""
        blocks = "".join(f"\n```python\n{piece.strip()}\n```" for piece in code)
        body = {"text": text + blocks, "user_id": "ada", "user_name": "Ada Lovelace"}
        answer = self.http.post(
            f"chats/{quote(chat_key, safe='')}/messages",
            params={"wait": wait},
            json=body,
            headers={"Idempotency-Key": uuid.uuid4().hex},
        )
        assert answer.is_success, answer.text
        return str(answer.json()["turn_id"])

    def turn(self, turn_id: str) -> dict[str, Any]:
        """Return a turn's tree."""
        answer = self.http.get(f"turns/{turn_id}")
        assert answer.is_success, answer.text
        return dict(answer.json())

    def ended(self, turn_id: str, *, seconds: float = WAIT_SECONDS) -> dict[str, Any]:
        """Wait until a turn has ended, or its program waits."""

        def end() -> dict[str, Any] | None:
            tree = self.turn(turn_id)
            is_over = tree["state"] in ("done", "failed", "cancelled") or tree["waits_for"] or tree["waits"]
            return tree if is_over else None

        return dict(wait_until(end, what=self.fleet.waiting_for("the end of the turn"), seconds=seconds))

    @contextlib.contextmanager
    def database(self) -> Iterator[sqlite3.Connection]:
        """Write to the database past the product, in one transaction."""
        path = make_url(self.fleet.settings.database.url or "").database
        assert path is not None
        with contextlib.closing(sqlite3.connect(path, timeout=WAIT_SECONDS)) as database, database:
            yield database

    def call(self, method: str, chat_key: str = "trials", **kwargs: Any) -> Any:
        """Call a method; returns the answer."""
        body = {"method": method, "chat_key": chat_key, "kwargs": kwargs}
        answer = self.http.post("calls", json=body)
        assert answer.is_success, answer.text
        return answer.json()

    def _logged_in(self) -> Any:
        if self._state is None:
            context = self.browser.new_context(viewport=DESKTOP)
            page = context.new_page()
            page.set_default_timeout(_BROWSER_MILLISECONDS)
            page.goto(f"{self.url}/console/")
            page.get_by_label("Key").fill(self.key)
            page.get_by_role("button", name="Log in").click()
            page.get_by_role("heading", name="Chats").wait_for()
            self._state = context.storage_state()
            context.close()
        return self._state


@contextlib.contextmanager
def open_console(
    directory: Path, redis_url: str, database_url: str, *, lanes: tuple[str, ...], **settings: Any
) -> Iterator[Console]:
    """Start a system with a model that runs what it is asked to, a gateway and a browser."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="pip install nekro-workers[browser]")
    if BROWSER is None:
        pytest.skip("no Chromium: apt-get install chromium")
    model = CodeModel()
    llm = {
        "base_url": model.start(), "model": "kitchen-1", "stream": True,
        "input_price_per_million": 2.0, "output_price_per_million": 8.0,
    }  # fmt: skip
    settings = {
        "plugins": {"dirs": (PLUGINS,)},
        "sandbox": {"max_calls": 5000, "wall_seconds": 600},
        **settings,
    }
    fleet = build_fleet(directory, redis_url, database_url, is_migrated=False, llm=llm, **settings)
    try:
        key = make_key(fleet.settings, *Scope)
        fleet.start(*lanes)
        with GatewayProcess(fleet) as gateway, sync_api.sync_playwright() as driver:
            browser = driver.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
            try:
                console = Console(fleet, gateway, browser, model, key)
                yield console
                console.http.close()
            finally:
                browser.close()
    finally:
        fleet.stop()
        model.stop()


def axe_script() -> str:
    """Return the script of the accessibility checker, or skip the test."""
    found = subprocess.run([str(_ROOT / "scripts" / "install-axe")], capture_output=True, text=True)
    if found.returncode:
        pytest.skip(f"axe-core cannot be installed: {found.stderr.strip()[-300:]}")
    return Path(found.stdout.strip()).read_text("utf-8")


def axe_violations(watched: Watched, script: str) -> list[str]:
    """Return what the checker finds in a page, one line per element.

    It is evaluated through the browser's debugger, which the page's policy does not concern.
    """
    watched.page.evaluate(f"() => {{ if (!window.axe) {{ {script} }} }}")
    options: dict[str, Any] = {"resultTypes": ["violations"]}
    found = watched.page.evaluate("async options => (await axe.run(document, options)).violations", options)
    return [
        f"{one['id']}: {node['html'][:160]} {json.dumps(node['any'][:1] and node['any'][0]['message'])}"
        for one in found
        for node in one["nodes"]
    ]
