"""The pages that a plugin names with ``webui_path``: a file, a directory, or a path of its router."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
from loaded_plugins import unload_plugins

from nekro.extensions.plugin_pages.site import application_of
from nekro.plugins.loader import load_plugins
from nekro_agent.errors import InvalidValueError

CODE = """
from fastapi import APIRouter
from nekro_agent.api.plugin import NekroPlugin

plugin = NekroPlugin("n", "site", "", "1", "Ada", "", webui_path={path!r})


@plugin.mount_router()
def router():
    made = APIRouter()
    made.add_api_route("/panel", lambda: "routed")
    return made
"""
URL = "/plugins/Ada.site"


@asynccontextmanager
async def site(folder: Path, path: str) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a plugin with this ``webui_path``."""
    for name, text in {
        "web/home.html": "home",
        "web/app.js": "js",
        "web/.hidden": "x",
        "outside": "x",
    }.items():
        (folder / "site" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "site" / name).write_text(text)
    (folder / "site" / "__init__.py").write_text(CODE.format(path=path))
    loaded = load_plugins([folder], shipped=False, entry_points=False, data_dir=folder / "data")
    try:
        transport = httpx.ASGITransport(application_of(loaded.plugins[0]))
        async with httpx.AsyncClient(transport=transport, base_url="http://host") as client:
            yield client
    finally:
        unload_plugins(loaded)


async def texts(client: httpx.AsyncClient, *paths: str) -> list[str]:
    answers = [await client.get(f"{URL}{path}", follow_redirects=True) for path in paths]
    return [answer.text.strip('"') if answer.is_success else str(answer.status_code) for answer in answers]


@pytest.mark.parametrize("path", ["/", "/panel", "/etc"])
async def test_a_path_of_the_router_opens_no_directory_of_the_host(tmp_path: Path, path: str) -> None:
    async with site(tmp_path, path) as client:
        assert await texts(client, "/panel", "/etc/passwd", "/passwd", "/") == ["routed", "404", "404", "404"]


async def test_a_page_is_served_with_the_files_beside_it(tmp_path: Path) -> None:
    async with site(tmp_path, "web/home.html") as client:
        served = await texts(client, *(f"/__webui__{path}" for path in ("", "/", "/home.html", "/app.js")))
        assert served == ["home", "home", "home", "js"]
        assert await texts(client, "/panel", "/", "/__webui__/.hidden", "/__webui__/%2e%2e/outside") == [
            "routed", "404", "404", "404",
        ]  # fmt: skip


async def test_a_page_beside_the_code_does_not_publish_the_code(tmp_path: Path) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "page.html").write_text("page")
    async with site(tmp_path, "page.html") as client:
        served = await texts(client, "/__webui__/", "/__webui__/outside", "/__webui__/__init__.py")
        assert served == ["page", "x", "404"]


@pytest.mark.parametrize("path", ["missing.html", "missing", "../data", "web/app.js"])
async def test_a_path_that_names_nothing_is_an_error(tmp_path: Path, path: str) -> None:
    with pytest.raises(InvalidValueError, match=r"Ada\.site: webui_path"):
        async with site(tmp_path, path):
            pass
