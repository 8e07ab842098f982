"""Published servers: every tool is listed with its signature, and called from a sandbox profile of its own.

``make mcp-servers`` installs them; one that this machine lacks is left out by name.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from mcp_world import World, opened
from waiting import wait_until

from broker_config.settings import Settings
from nekro_agent.errors import MethodFailedError
from nekro_agent.methods import describe_signature
from nekro_agent.testing.world import InMemoryRuntime

pytestmark = pytest.mark.extended

INSTALLED = Path(__file__).resolve().parents[2] / ".mcp-servers"
NODE = INSTALLED / "node" / "node_modules" / "@modelcontextprotocol"


def python_server(name: str, *args: str, of: str = "servers", **own: Any) -> dict[str, Any]:
    command = INSTALLED / of / "bin" / name
    if not command.exists():
        pytest.skip(f"{name} is not installed; run make mcp-servers")
    return {"command": str(command), "args": list(args), "nekro": own}


def node_server(name: str, *args: str, **own: Any) -> dict[str, Any]:
    script = NODE / name / "dist" / "index.js"
    if shutil.which("node") is None or not script.exists():
        pytest.skip(f"{name} is not installed; it needs node and make mcp-servers")
    files = {str(INSTALLED / "node"): "ro", **own.pop("files", {})}
    return {"command": "node", "args": [str(script), *args], "nekro": {"files": files, **own}}


def signatures(world: Any) -> dict[str, str]:
    return {m.func.__name__: describe_signature(m.func) for m in world.plugin.sandbox_methods}


async def test_mcp_server_time(settings: Settings) -> None:
    async with opened(settings, python_server("mcp-server-time", "--local-timezone", "UTC"), "time") as world:
        found = signatures(world)
        assert found["get_current_time"].startswith("(timezone: str)")
        assert found["convert_time"].startswith("(source_timezone: str, time: str, target_timezone: str)")
        assert len(found) == 2
        now = await world.call("get_current_time", "Europe/Berlin")
        assert now["timezone"] == "Europe/Berlin" if isinstance(now, dict) else "Europe/Berlin" in now
        converted = await world.call("convert_time", "UTC", "12:00", "Asia/Tokyo")
        assert "21:00" in str(converted)
        with pytest.raises(MethodFailedError, match=r"McpToolError: .*Nowhere"):
            await world.call("get_current_time", "Nowhere/Town")


async def test_mcp_server_git(settings: Settings, tmp_path: Path) -> None:
    repository = tmp_path / "repository"
    identity = ("-c", "user.name=Ada", "-c", "user.email=ada@example.org")
    for arguments in (("init", "-q"), (*identity, "commit", "-q", "--allow-empty", "-m", "The first")):
        subprocess.run(["git", *arguments], cwd=_made(repository), check=True)
    server = python_server("mcp-server-git", "--repository", str(repository), files={str(repository): "ro"})
    server["env"] = {"GIT_CONFIG_COUNT": "1", "GIT_CONFIG_KEY_0": "safe.directory", "GIT_CONFIG_VALUE_0": "*"}
    async with opened(settings, server, "git") as world:
        found = signatures(world)
        assert {"git_status", "git_log", "git_diff", "git_commit", "git_branch"} <= set(found)
        assert found["git_log"].startswith("(repo_path: str, *, max_count: int = 10")
        assert "The first" in str(await world.call("git_log", str(repository)))
        assert "nothing to commit" in str(await world.call("git_status", str(repository)))
        with pytest.raises(MethodFailedError, match="McpToolError"):
            await world.call("git_add", str(repository), files=["no-such-file"])


async def test_mcp_server_fetch(settings: Settings, pages: str) -> None:
    # Without --ignore-robots-txt it asks for robots.txt first, which is not there.
    server = python_server("mcp-server-fetch", "--allow-private-ips", network=True)
    async with opened(settings, server, "fetch") as world:
        assert list(signatures(world)) == ["fetch"]
        assert "A page of the tests" in str(await world.call("fetch", f"{pages}/page.html", raw=True))
        with pytest.raises(MethodFailedError, match="McpToolError"):
            await world.call("fetch", f"{pages}/missing.html")


async def test_mcp_server_fetch_without_a_declared_network(settings: Settings, pages: str) -> None:
    server = python_server("mcp-server-fetch", "--allow-private-ips")
    async with opened(settings, server, "fetch") as world:
        with pytest.raises(MethodFailedError, match="McpToolError"):
            await world.call("fetch", f"{pages}/page.html", raw=True)


async def test_mcp_server_sqlite(settings: Settings) -> None:
    server = python_server("mcp-server-sqlite", "--db-path", "/home/program/a.db", of="servers-of-2025")
    async with opened(settings, server, "sqlite") as world:
        found = signatures(world)
        assert set(found) == {
            "read_query", "write_query", "create_table", "list_tables", "describe_table", "append_insight",
        }  # fmt: skip
        await world.call("create_table", "CREATE TABLE t (a INTEGER)")
        await world.call("write_query", "INSERT INTO t VALUES (42)")
        assert "42" in str(await world.call("read_query", "SELECT a FROM t"))
        assert "'t'" in str(await world.call("list_tables"))
        assert "INTEGER" in str(await world.call("describe_table", "t"))
        assert "added" in str(await world.call("append_insight", "many"))
        assert "error" in str(await world.call("read_query", "SELECT b FROM none")).lower()
    assert (settings.data_dir / "mcp" / "sqlite" / "a.db").exists()


async def test_server_everything(settings: Settings) -> None:
    async with opened(settings, node_server("server-everything"), "every") as world:
        found = signatures(world)
        assert found["echo"].startswith("(message: str)")
        assert found["get_sum"].startswith("(a: float, b: float)")
        assert "Literal['New York', 'Chicago', 'Los Angeles']" in found["get_structured_content"]
        assert await world.call("echo", "hi") == "Echo: hi"
        assert "5" in await world.call("get_sum", 2, 3)
        weather = await world.call("get_structured_content", "Chicago")
        assert set(weather) == {"temperature", "conditions", "humidity"}
        assert "HOME" in await world.call("get_env")
        links = await world.call("get_resource_links", count=2)
        assert [one["uri"].startswith("demo://") for one in links if isinstance(one, dict)] == [True, True]
        assert "plaintext" in str(await world.call("get_resource_reference"))
        async with InMemoryRuntime(data_dir=settings.data_dir):
            parts = await world.call("get_tiny_image")
        (picture,) = [part for part in parts if part.startswith("/app/uploads/")]
        assert picture.endswith(".png")
        await world.call("trigger_long_running_operation", duration=0.2, steps=2)
        assert world.progress[-1][0] == 100.0
        with pytest.raises(MethodFailedError, match=r"McpToolError|McpServerError"):
            await world.call("get_sum", "x", "y")


async def test_server_filesystem(settings: Settings, tmp_path: Path) -> None:
    shared, hidden = _made(tmp_path / "shared"), _made(tmp_path / "hidden")
    shared.chmod(0o777)
    (hidden / "secret").write_text("secret")
    server = node_server("server-filesystem", str(shared), files={str(shared): "rw"})
    async with opened(settings, server, "files") as world:
        found = signatures(world)
        assert len(found) == 14
        assert found["write_file"].startswith("(path: str, content: str)")
        await world.call("write_file", str(shared / "a.txt"), "written")
        assert (shared / "a.txt").read_text() == "written"
        assert "written" in str(await world.call("read_text_file", str(shared / "a.txt")))
        edits = [{"oldText": "written", "newText": "changed"}]
        await world.call("edit_file", str(shared / "a.txt"), edits)
        await world.call("create_directory", str(shared / "b"))
        await world.call("move_file", str(shared / "a.txt"), str(shared / "b" / "a.txt"))
        assert "[DIR] b" in str(await world.call("list_directory", str(shared)))
        assert "a.txt" in str(await world.call("directory_tree", str(shared)))
        assert "a.txt" in str(await world.call("search_files", str(shared), "**/a.txt"))
        assert str(shared) in str(await world.call("list_allowed_directories"))
        for path in (hidden / "secret", Path("/etc/shadow"), settings.data_dir):
            with pytest.raises(MethodFailedError, match="McpToolError"):
                await world.call("read_text_file", str(path))
        (shared / "link").symlink_to(hidden / "secret")
        with pytest.raises(MethodFailedError, match="McpToolError"):
            await world.call("read_text_file", str(shared / "link"))


@contextmanager
def served(port: int) -> Iterator[str]:
    """The server `everything`, made with the TypeScript SDK, over HTTP with sessions."""
    script = NODE / "server-everything" / "dist" / "index.js"
    if shutil.which("node") is None or not script.exists():
        pytest.skip("server-everything is not installed; it needs node and make mcp-servers")
    command = ["node", str(script), "streamableHttp"]
    quiet = subprocess.DEVNULL
    process = subprocess.Popen(command, env={**os.environ, "PORT": str(port)}, stdout=quiet, stderr=quiet)
    try:
        wait_until(lambda: is_open(port), what="the server")
        yield f"http://127.0.0.1:{port}/mcp"
    finally:
        process.kill()
        process.wait()


def is_open(port: int) -> bool:
    with socket.socket() as one:
        return one.connect_ex(("127.0.0.1", port)) == 0


async def test_a_server_of_the_typescript_sdk_that_was_restarted_gets_a_new_session(
    settings: Settings,
) -> None:
    """It answers an unknown session with 400 and -32000."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    with served(port) as url:
        world = World(settings, {"url": url}, "every")
        before, _ = await world.hub.listing(world.server)
        assert await world.call("get_sum", 2, 3)
    try:
        with served(port):
            sums = await asyncio.gather(*(world.call("get_sum", 2, n) for n in range(4)))
            assert [str(2 + n) in one for n, one in enumerate(sums)] == [True] * 4
            after, listing = await world.hub.listing(world.server)
            assert after is not before and len(listing.tools) > 5 and listing.notes == []
    finally:
        await world.hub.close()


def _made(path: Path) -> Path:
    path.mkdir(exist_ok=True)
    return path


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None: ...


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A web server on the loopback address."""
    directory = tmp_path_factory.mktemp("pages")
    (directory / "page.html").write_text("<html><body><p>A page of the tests</p></body></html>")
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=str(directory))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()
