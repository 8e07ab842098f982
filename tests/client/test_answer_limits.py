"""No HTTP client of the product decodes or collects an answer without a limit."""

from __future__ import annotations

import ast
import gzip
import resource
import threading
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest

from broker_config.model_groups import model_group
from broker_config.settings import Settings
from nekro.agent.llm.trial import try_group
from nekro_agent.errors import LLMError
from nekro_agent.plugin import NekroPlugin
from nekro_agent.services.agent.openai import gen_openai_embeddings
from nekro_agent.testing import InMemoryRuntime
from nekro_client.answer_limits import AnswerTooLargeError, EncodedAnswerError, limited, limited_blocking
from nekro_client.client import Client
from nekro_client.errors import UnreachableError

ROOT = Path(__file__).parents[2]
#: Constructions of clients of httpx, and of libraries that make one.
CLIENTS = {"AsyncClient", "Client", "AsyncQdrantClient", "AsyncOpenAI", "DefaultAsyncHttpxClient"}
#: Constructions without the hooks, and why they need none.
WITHOUT = {
    "nekro/extensions/mcp/client/http.py": "it refuses encoded answers and bounds the others",
    "nekro/extensions/plugin_pages/proxy.py": "it passes bodies on in pieces, as they were sent",
    "nekro_agent/services/agent/openai.py": "AsyncOpenAI gets a client with the hooks",
}
#: Modules that use a library for HTTP which decodes nothing, in bounded pieces.
OTHERS = {
    "nekro/cli/commands/flower.py", "nekro/cli/services/presence.py", "nekro/gateway/outgoing.py",
    "nekro_agent/downloads/http.py", "nekro_agent/downloads/socket.py",
}  # fmt: skip
LIBRARIES = {"aiohttp", "http.client", "httpcore", "requests", "urllib.request", "urllib3"}
#: 50 KB that become 50 MB, and a few KB that become 4 GB in two layers.
BOMB = gzip.compress(bytes(50 << 20))
LAYERS = gzip.compress(gzip.compress(bytes(16 << 20)) * 256)


def sources() -> Iterator[tuple[str, ast.Module]]:
    """Yield the modules of the product."""
    packages = ("broker_config", "nekro", "nekro_agent", "nekro_client", "plugin_pkgs", "storage", "workers")
    for package in packages:
        for path in sorted((ROOT / package).rglob("*.py")):
            yield path.relative_to(ROOT).as_posix(), ast.parse(path.read_text("utf-8"))


def name_of(call: ast.Call) -> str:
    return ast.unparse(call.func)


@pytest.mark.one_python
def test_every_client_limits_its_answers() -> None:
    unlimited, without, found = [], set(), 0
    for path, tree in sources():
        calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
        for call in calls:
            module, _, name = name_of(call).rpartition(".")
            if name not in CLIENTS or (module and module not in ("httpx", "httpx2")):
                continue
            if not module and name in ("AsyncClient", "Client") and "nekro_client" in ast.unparse(tree):
                continue  # our own client, whose connections have the hooks
            found += 1
            hooks = next((word.value for word in call.keywords if word.arg == "event_hooks"), None)
            if isinstance(hooks, ast.Call) and name_of(hooks) in ("limited", "limited_blocking"):
                continue
            without.add(path)
            if path not in WITHOUT:
                unlimited.append(f"{path}:{call.lineno}")
    assert found >= 12
    assert not unlimited, "give these clients event_hooks=limited()"
    assert without == set(WITHOUT)


@pytest.mark.one_python
def test_no_other_library_for_http_is_used_unseen() -> None:
    users = set()
    for path, tree in sources():
        for node in ast.walk(tree):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.module:
                names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            if LIBRARIES & set(names):
                users.add(path)
            one_shot = isinstance(node, ast.Call) and name_of(node) in (
                "httpx.get", "httpx.post", "httpx.request", "httpx.stream"
            )  # fmt: skip
            assert not one_shot, path
    assert users == OTHERS


@contextmanager
def server(body: bytes, **headers: str) -> Iterator[str]:
    """Serve one body for every request, whatever encodings it accepts."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.rfile.read(int(self.headers.get("content-length") or 0))
            self.send_response(200)
            for name, value in {"content-type": "application/json", **headers}.items():
                self.send_header(name.replace("_", "-"), value)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_GET

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        thread = threading.Thread(target=running.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{running.server_address[1]}"
        finally:
            running.shutdown()
            thread.join()


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


@pytest.mark.parametrize(
    ("body", "coding", "error"),
    [
        (BOMB, "gzip", AnswerTooLargeError),
        (zlib.compress(bytes(50 << 20)), "deflate", AnswerTooLargeError),
        (LAYERS, "gzip, gzip", EncodedAnswerError),
        (b"x", "br", EncodedAnswerError),
        (b"no gzip", "gzip", httpx.DecodingError),
        (bytes(2 << 20), "identity", AnswerTooLargeError),
    ],
    ids=["gzip", "deflate", "layers", "br", "broken", "plain"],
)
async def test_a_small_answer_does_not_become_a_large_one(
    body: bytes, coding: str, error: type[Exception]
) -> None:
    with server(body, content_encoding=coding) as url:
        before = peak_bytes()
        async with httpx.AsyncClient(event_hooks=limited(1 << 20)) as client:
            with pytest.raises(error, match=r"127\.0\.0\.1"):
                await client.get(url)
        with httpx.Client(event_hooks=limited_blocking(1 << 20)) as client, pytest.raises(error):
            client.get(url)
        assert peak_bytes() - before < 32 << 20


@pytest.mark.parametrize(
    ("body", "coding"),
    [
        (b"text", "identity"),
        (gzip.compress(b"te") + gzip.compress(b"xt"), "GZIP"),
        (zlib.compress(b"text"), "deflate"),
        (zlib.compress(b"text", wbits=-15), "deflate"),
        (b"", "gzip"),
    ],
    # The bytes of gzip contain a time, which differs between the processes of a run.
    ids=["plain", "members", "deflate", "raw", "empty"],
)
async def test_an_encoded_answer_of_a_server_that_ignores_what_was_asked_is_read(
    body: bytes, coding: str
) -> None:
    with server(body, content_encoding=coding) as url:
        async with httpx.AsyncClient(event_hooks=limited()) as client:
            assert (await client.get(url)).content == (b"text" if body else b"")


@pytest.mark.one_python
async def test_an_answer_without_a_limit_is_bounded_if_it_was_encoded() -> None:
    with server(gzip.compress(bytes(65 << 20)), content_encoding="gzip") as url:
        async with httpx.AsyncClient(event_hooks=limited(None)) as client:
            with pytest.raises(AnswerTooLargeError):
                async with client.stream("GET", url) as response:
                    async for piece in response.aiter_bytes():
                        assert len(piece) <= 1 << 16
    with server(bytes(65 << 20)) as url:
        async with httpx.AsyncClient(event_hooks=limited(None)) as client:
            assert len((await client.get(url)).content) == 65 << 20


def test_the_client_of_a_gateway_tells_of_an_answer_that_is_too_large() -> None:
    key = "nk_0123456789abcdef_" + "x" * 43
    with (
        server(gzip.compress(bytes(65 << 20)), content_encoding="gzip") as url,
        Client(url, key, retry_seconds=0) as client,
        pytest.raises(UnreachableError, match="more than 67108864 bytes"),
    ):
        client.keys.list()


async def test_an_endpoint_of_a_model_cannot_fill_the_memory() -> None:
    with server(gzip.compress(bytes(65 << 20)), content_encoding="gzip") as url:
        models = {"e": {"model": "m", "base_url": url, "embedding": True}}
        settings = Settings.load(
            env_file=None, llm={"base_url": url, "model": "m", "tries": 1}, models=models
        )
        for group in ("e", "default"):
            tried = await try_group(settings.llm, model_group(settings, group))
            assert "more than 67108864 bytes" in str(tried["error"]), tried


async def test_an_endpoint_of_a_plugin_cannot_fill_the_memory(tmp_path: Path) -> None:
    plugin = NekroPlugin("sample", "sample", "", "1.0.0", "Ada", "")
    async with InMemoryRuntime(plugin, data_dir=tmp_path):
        with (
            server(gzip.compress(bytes(65 << 20)), content_encoding="gzip") as url,
            pytest.raises(LLMError, match="more than 67108864 bytes"),
        ):
            await gen_openai_embeddings("m", "text", "key", url)
