"""Files with scripts, in a real browser: none of them runs in the origin of the API."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager
from datetime import timedelta
from itertools import islice
from typing import Any, Final, TypeVar

import httpx
import pytest
from fastapi import FastAPI, Response
from gateway_server import served
from local_key import local_headers_of
from worker_fleet import Fleet

from nekro.gateway.app import create_app
from nekro_agent.shared_clock import shared_time

pytestmark = pytest.mark.extended

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
T = TypeVar("T")
SCRIPT: Final = "console.log('ran ' + location.href)"
HTML: Final = f'<!doctype html><body onload="{SCRIPT}"><script>{SCRIPT}</script></body>'
_SVG: Final = f'<svg xmlns="http://www.w3.org/2000/svg" onload="{SCRIPT}"><script>{SCRIPT}</script></svg>'
_XHTML: Final = HTML.replace("<!doctype html>", '<html xmlns="http://www.w3.org/1999/xhtml">') + "</html>"
_PDF: Final = (
    "%PDF-1.4\n1 0 obj<</Type/Catalog/Pages 2 0 R/OpenAction<</S/JavaScript/JS(app.alert\\(1\\))>>>>endobj\n"
    "2 0 obj<</Type/Pages/Kids[]/Count 0>>endobj\ntrailer<</Root 1 0 R>>\n%%EOF"
)
_PNG: Final = b"\x89PNG\r\n\x1a\n"
#: Files by name; the media type that they are served with follows from name and content.
FILES: Final[dict[str, bytes]] = {
    "page.html": HTML.encode(),
    "page.htm": b"\xff\xfe" + HTML.encode("utf-16-le"),
    "page.xhtml": _XHTML.encode(),
    "page.xml": b'<?xml version="1.0"?>' + _XHTML.encode(),
    "page.shtml": HTML.encode(),
    "page.txt": HTML.encode(),
    "page": HTML.encode(),
    "page.pdf": HTML.encode(),
    "page.png": HTML.encode(),
    "page.jpg": b"<!--" + HTML.encode(),
    "page.mhtml": b"MIME-Version: 1.0\r\nContent-Type: text/html\r\n\r\n" + HTML.encode(),
    "drawing.svg": _SVG.encode(),
    "drawing.svgz": _SVG.encode(),
    "drawing.png": _SVG.encode(),
    "document.pdf": _PDF.encode(),
    "both.pdf": f"%PDF-1.4\n{HTML}".encode(),
    "both.png": _PNG + HTML.encode(),
    "both.html": _PNG + HTML.encode(),
    "both.gif": f"GIF89a/*{HTML}*/=1;{SCRIPT}".encode(),
    "script.js": SCRIPT.encode(),
    "script.mjs": SCRIPT.encode(),
    "worker.js": f"{SCRIPT};onfetch=()=>{{}}".encode(),
    "style.css": b"@import 'x'; body { background: url(/healthz?ran) }",
    "page.hta": HTML.encode(),
    "page.swf": b"FWS" + HTML.encode(),
    "page.wasm": b"\0asm",
    "page.php": HTML.encode(),
    "page.html.": HTML.encode(),
    "page.htm;.png": HTML.encode(),
}
#: Ways in which a foreign page can load a file.
_EMBEDS: Final = (
    "<iframe src='{0}'></iframe>", "<object data='{0}'></object>", "<embed src='{0}'>", "<img src='{0}'>",
    "<object type='text/html' data='{0}'></object>", "<object type='image/svg+xml' data='{0}'></object>",
    "<script src='{0}'></script>", "<script type='module' src='{0}'></script>",
    "<link rel='stylesheet' href='{0}'>", "<video src='{0}'></video>",
)  # fmt: skip


class ForeignSite:
    """A site of another origin; its pages load files of the gateway."""

    def __init__(self) -> None:
        self.pages: dict[str, tuple[str, bytes]] = {}
        self.app = FastAPI()
        self.app.get("/{name}")(self.page)

    async def page(self, name: str) -> Response:
        media_type, content = self.pages[name]
        return Response(content, media_type=media_type)


@asynccontextmanager
async def browser_page() -> AsyncIterator[tuple[Any, list[str]]]:
    """A page in Chromium, and the addresses at which scripts ran."""
    playwright = pytest.importorskip("playwright.async_api", reason="pip install nekro-workers[browser]")
    if BROWSER is None:
        pytest.skip("no Chromium: apt-get install chromium")
    async with playwright.async_playwright() as driver:
        browser = await driver.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        ran: list[str] = []

        def told(message: Any) -> None:
            if message.text.startswith("ran "):
                ran.append(message.text.removeprefix("ran "))

        try:
            context = await browser.new_context()
            context.on("console", told)
            yield await context.new_page(), ran
        finally:
            await browser.close()


async def stored(client: httpx.AsyncClient, services: Any) -> dict[str, list[str]]:
    """Store the files; returns the addresses of each: with a key, and as a link."""
    urls = {}
    for name, content in FILES.items():
        answer = await client.post("/api/v1/chats/active/files", files={"file": (name, content)})
        assert answer.status_code == 201, answer.text
        (info,) = answer.json()
        until = shared_time() + timedelta(days=1)
        token = services.file_ids.link("active", info["id"], until=until)
        base = str(client.base_url).rstrip("/")
        urls[name] = [f"{base}{info['url']}", f"{base}/links/{token}/page.html"]
    return urls


@pytest.mark.parametrize("fresh_fleet", ["sqlite"], indirect=True)
async def test_a_script_of_a_file_does_not_run_in_the_origin_of_the_api(fresh_fleet: Fleet) -> None:
    app, site = create_app(fresh_fleet.settings), ForeignSite()
    async with served(app) as client, served(site.app) as foreign, browser_page() as (page, ran):
        await client.get("/healthz")  # answered when the services have started
        # As if each request of the browser had a key, which a foreign page cannot add.
        await page.set_extra_http_headers(local_headers_of(app))
        urls = await stored(client, app.state.services)
        origin = str(foreign.base_url).rstrip("/")
        # The browser runs scripts, and they are seen: the same page, served without the gateway's headers.
        site.pages["control"] = ("text/html", HTML.encode())
        await page.goto(f"{origin}/control")
        assert ran == [f"{origin}/control"] * 2
        ran.clear()
        for name, (url, _) in urls.items():
            # Only pictures are shown by navigation; everything else is saved.
            assert await opened(page, url) is (name in ("both.png", "both.html", "both.gif")), name
        assert ran == []
        for files in batched(urls.values(), 10):
            embeds = "".join(embed.format(link) for _, link in files for embed in _EMBEDS)
            site.pages["embeds"] = ("text/html", f"<!doctype html>{embeds}".encode())
            await page.goto(f"{origin}/embeds")
        # A script that a foreign page loads as such runs there, in the origin of that page.
        assert set(ran) == {f"{origin}/embeds"}


def batched(items: Iterable[T], size: int) -> Iterator[list[T]]:
    given = iter(items)
    while batch := list(islice(given, size)):
        yield batch


async def opened(page: Any, url: str) -> bool:
    """Navigate to a file; False if the browser saves it instead of showing it."""
    await page.goto("about:blank")
    try:
        await page.goto(url)
    except Exception as exc:
        assert "Download is starting" in str(exc) or "ERR_ABORTED" in str(exc), exc
        return False
    return True


@pytest.mark.parametrize("fresh_fleet", ["sqlite"], indirect=True)
async def test_every_document_of_the_api_has_no_origin_and_runs_no_script(fresh_fleet: Fleet) -> None:
    app = create_app(fresh_fleet.settings)
    async with served(app) as client, browser_page() as (page, ran):
        await client.get("/healthz")  # answered when the services have started
        urls = await stored(client, app.state.services)
        base = str(client.base_url).rstrip("/")
        quoting = f"/api/v1/chats/{HTML}/messages"  # a problem document quotes the request
        for url in (f"{base}/healthz", f"{base}/{HTML}", f"{base}{quoting}", *urls["both.png"]):
            await page.goto(url)
            # Without an origin a document reads no answers of the API and registers no service worker.
            assert await page.evaluate("self.origin") == "null", url
            assert ran == [], url
