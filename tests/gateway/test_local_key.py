"""The local key: who has it, and what another user of the machine gets without it."""

from __future__ import annotations

import asyncio
import json
import os
import re
import stat
import subprocess
import sys
import urllib.parse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from gateway_process import GatewayProcess
from gateway_server import served
from local_key import local_headers
from redis_process import free_port
from waiting import WAIT_SECONDS
from worker_fleet import Fleet

from broker_config.secret_files import secret_path, secret_text
from nekro.app.services import Services
from nekro.cli.services.process import addresses
from nekro.gateway.access.keys import LocalKey
from nekro.gateway.access.signed_texts import LoginCodes, make_code
from nekro.gateway.app import create_app
from nekro.operations.actor import RefusedError
from nekro_agent.errors import SettingsError
from nekro_client import AsyncClient, AuthenticationError, Client
from nekro_client import local_key as local_key_of_client

#: A user of this machine who runs nothing of ours.
STRANGER = 61_234
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as a second user")
sqlite_only = pytest.mark.parametrize("fresh_fleet", ["sqlite"], indirect=True)

#: What a stranger tries: every kind of endpoint, with a browser's and a proxy's headers too.
REQUESTS = (
    ("GET", "/api/v1/chats", {}),
    ("GET", "/api/v1/keys", {}),
    ("GET", "/api/v1/keys", {"X-Forwarded-For": "127.0.0.1"}),
    ("GET", "/api/v1/keys", {"Host": "localhost"}),
    ("POST", "/api/v1/keys", {}),
    ("POST", "/api/v1/runs", {}),
    ("POST", "/api/v1/calls", {}),
    ("POST", "/api/v1/stream-tickets", {}),
    ("GET", "/api/v1/changes", {}),
    ("GET", "/api/v1/changes?ticket=nt_local_9999999999_" + "0" * 64, {}),
    ("GET", "/api/v1/mcp/servers", {}),
    ("PUT", "/api/v1/mcp/servers/x", {}),
    ("POST", "/v1/chat/completions", {}),
    ("POST", "/v1/responses", {}),
    ("GET", "/v1/models", {}),
    ("POST", "/mcp", {}),
    ("GET", "/metrics", {}),
    ("GET", "/console/session", {}),
)


#: The interpreter may be in a directory of root, so everything is imported before.
BECOME_STRANGER = f"""
import encodings.idna, http.client, http.server, json, os, sys, urllib.parse
os.setgroups([]); os.setresgid(*[{STRANGER}] * 3); os.setresuid(*[{STRANGER}] * 3)
"""


def as_stranger(script: str, *arguments: str) -> str:
    """Run Python as the second user; returns what it prints."""
    done = subprocess.run(
        [sys.executable, "-I", "-c", BECOME_STRANGER + script, *arguments],
        cwd="/", capture_output=True, text=True, timeout=WAIT_SECONDS, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


ASK = """
url, requests = urllib.parse.urlsplit(sys.argv[1]), json.loads(sys.argv[2])
for method, path, headers in requests:
    connection = http.client.HTTPConnection(url.hostname, url.port, timeout=60)
    body = b'{}' if method != 'GET' else None
    connection.request(method, path, body, {'Content-Type': 'application/json', **headers})
    print(connection.getresponse().status)
    connection.close()
"""

LOOK = """
for directory, names, files in os.walk(sys.argv[1]):
    for name in files:
        try:
            open(os.path.join(directory, name), 'rb').close()
        except OSError:
            continue
        print(os.path.join(directory, name))
try:
    open(os.path.join(sys.argv[1], 'secrets', 'api.key')).close()
    print('the key')
except PermissionError:
    pass
"""


@pytest.fixture
def reachable(tmp_path: Path) -> None:
    """Let the second user pass pytest's private directories, so that only our own modes protect the data."""
    for directory in (tmp_path, *tmp_path.parents):
        if directory.stat().st_uid == os.geteuid() and str(directory) != "/":
            directory.chmod(directory.stat().st_mode | 0o055)


@needs_root
@sqlite_only
def test_another_user_of_the_machine_gets_nothing_from_a_gateway_and_its_files(
    fresh_fleet: Fleet, reachable: None
) -> None:
    with GatewayProcess(fresh_fleet) as gateway, httpx.Client(base_url=gateway.url) as own:
        assert own.get("/api/v1/chats", headers=gateway.headers).status_code == 200
        told = as_stranger(ASK, gateway.url, json.dumps(REQUESTS)).split()
        wrong = [(request, code) for request, code in zip(REQUESTS, told, strict=True) if code != "401"]
        assert wrong == []
        probes = [("GET", "/healthz", {}), ("GET", "/readyz", {}), ("GET", "/console/", {})]
        assert as_stranger(ASK, gateway.url, json.dumps(probes)).split() == ["200"] * 3
        assert as_stranger(LOOK, str(fresh_fleet.settings.data_dir)) == ""


@sqlite_only
async def test_the_key_file_is_private_and_stays_over_restarts(fresh_fleet: Fleet) -> None:
    texts = []
    for _ in range(2):
        async with served(create_app(fresh_fleet.settings)) as client:
            assert (await client.get("/api/v1/keys")).json() == {"items": [], "next_cursor": None}
        path = secret_path(fresh_fleet.settings.data_dir, "api.key")
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        texts.append(path.read_text())
    assert texts[0] == texts[1]
    path.unlink()
    old = {"Authorization": f"Bearer {texts[0].strip()}"}
    async with served(create_app(fresh_fleet.settings)) as client:
        assert (await client.get("/api/v1/keys", headers=old)).json()["code"] == "key_invalid"
        assert (await client.get("/api/v1/keys")).status_code == 200


def spoil_mode(path: Path) -> None:
    path.chmod(0o640)


def spoil_link(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


def spoil_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def spoil_text(path: Path) -> None:
    path.write_text("nk_short\n")


def spoil_bytes(path: Path) -> None:
    path.write_bytes(b"\xff\n")


@pytest.mark.parametrize(
    "spoil", [spoil_mode, spoil_link, spoil_directory, spoil_text, spoil_bytes], ids=lambda one: one.__name__
)
def test_a_key_file_that_others_may_know_is_refused(
    tmp_path: Path, make_settings: Callable[..., Any], spoil: Callable[[Path], None]
) -> None:
    settings = make_settings(data_dir=tmp_path)
    path = LocalKey.open(settings).path
    spoil(path)
    with pytest.raises(SettingsError, match=re.escape(str(path))):
        LocalKey.open(settings)


@needs_root
def test_a_secret_or_a_directory_of_another_user_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "secrets" / "api.key"
    secret_text(path, lambda: "one")
    for spoiled in (path, path.parent):
        os.chown(spoiled, STRANGER, STRANGER)
        with pytest.raises(SettingsError, match=f"belongs to user {STRANGER}"):
            secret_text(path, lambda: "two")
        os.chown(spoiled, 0, 0)
    assert secret_text(path, lambda: "two") == "one"


async def test_processes_that_start_together_agree_on_one_key(tmp_path: Path) -> None:
    path = tmp_path / "secrets" / "api.key"
    texts = await asyncio.gather(
        *(asyncio.to_thread(secret_text, path, lambda number=number: f"text{number}") for number in range(16))
    )
    assert len(set(texts)) == 1
    assert [one.name for one in path.parent.iterdir()] == ["api.key"]


@sqlite_only
def test_the_client_finds_the_key_for_a_gateway_of_this_host_only(
    fresh_fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    with GatewayProcess(fresh_fleet) as gateway:
        monkeypatch.delenv("NEKRO_KEY", raising=False)
        monkeypatch.setenv("NEKRO_DATA_DIR", str(fresh_fleet.settings.data_dir))
        for host in ("127.0.0.1", "localhost"):
            with Client(gateway.url.replace("127.0.0.1", host), retry_seconds=0) as client:
                assert client.chats().items == []
        with Client(gateway.url, key="", retry_seconds=0) as client, pytest.raises(AuthenticationError):
            client.chats()
        sent: list[httpx.Request] = []

        def answer(request: httpx.Request) -> httpx.Response:
            sent.append(request)
            return httpx.Response(200, json={"items": [], "next_cursor": None})

        with Client("http://agent.example", transport=httpx.MockTransport(answer)) as client:
            client.chats()
        assert "authorization" not in sent[0].headers


@sqlite_only
async def test_the_client_sends_the_key_to_a_gateway_that_has_just_begun_to_listen(
    fresh_fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first look at the listeners of each request finds none."""
    look, looks = local_key_of_client._listeners, 0

    def late(url: httpx.URL) -> set[int]:
        nonlocal looks
        looks += 1
        return {-1} if looks % 2 else look(url)

    monkeypatch.delenv("NEKRO_KEY", raising=False)
    monkeypatch.setenv("NEKRO_DATA_DIR", str(fresh_fleet.settings.data_dir))
    monkeypatch.setattr(local_key_of_client, "_listeners", late)
    async with (
        served(create_app(fresh_fleet.settings), with_key=False) as http,
        AsyncClient(str(http.base_url), retry_seconds=0) as client,
    ):
        posted = await client.chat("late").send("hello", user_id="ada", to_agent=False)
        assert posted.message is not None and (await client.chats()).items[0].chat_key == "late"
    assert looks == 4


@needs_root
async def test_the_client_sends_no_key_to_a_port_on_which_another_user_listens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listen = """
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = b'{"items": [], "next_cursor": null}'
        print(self.headers.get('authorization'), flush=True)
        self.send_response(200)
        self.send_header('Content-Length', str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *_): pass
server = http.server.HTTPServer(('127.0.0.1', 0), Handler)
print(server.server_port, flush=True)
server.handle_request()
"""
    secret_text(secret_path(tmp_path, "api.key"), lambda: "nk_0123456789abcdef_" + "x" * 43)
    monkeypatch.setenv("NEKRO_DATA_DIR", str(tmp_path))
    monkeypatch.delenv("NEKRO_KEY", raising=False)
    for before, is_own in ((BECOME_STRANGER, False), ("import http.server", True)):
        process = subprocess.Popen(
            [sys.executable, "-I", "-c", before + listen], cwd="/", stdout=subprocess.PIPE, text=True
        )
        with process:
            assert process.stdout is not None
            port = int(await asyncio.to_thread(process.stdout.readline))
            async with AsyncClient(f"http://127.0.0.1:{port}", retry_seconds=0) as client:
                await client.chats()
            said = (await asyncio.to_thread(process.stdout.readline)).strip()
        assert said == ("Bearer nk_0123456789abcdef_" + "x" * 43 if is_own else "None")


@sqlite_only
def test_commands_find_the_key(fresh_fleet: Fleet) -> None:
    with GatewayProcess(fresh_fleet) as gateway:
        done = fresh_fleet.run("timers", "--json", variables={"NEKRO_URL": gateway.url})
        assert (done.returncode, json.loads(done.stdout)) == (0, []), done.stderr


def code_of(text: str) -> str:
    """Return the code of the link that a gateway prints."""
    found = re.search(r"console on (http://\S+)", text)
    assert found is not None, text
    link = urllib.parse.urlsplit(found[1])
    assert (link.path, link.query) == ("/console/", ""), "the code is in the fragment, which no server sees"
    return urllib.parse.parse_qs(link.fragment.partition("?")[2])["code"][0]


async def log_in(client: httpx.AsyncClient, code: str, **headers: str) -> httpx.Response:
    origin = str(client.base_url).rstrip("/")
    sent = {"Origin": origin, "Sec-Fetch-Site": "same-origin", **headers}
    return await client.post("/console/session", json={"key": code}, headers=sent)


async def test_the_printed_link_opens_the_console_once(fresh_fleet: Fleet, services: Services) -> None:
    async with served(create_app(fresh_fleet.settings), with_key=False) as client:
        said = addresses(str(client.base_url).rstrip("/"), services.settings)
        assert str(secret_path(services.settings.data_dir, "api.key")) in said
        assert local_headers(services.settings.data_dir)["Authorization"].split()[1] not in said
        code = code_of(said)
        # A page of another site cannot use it, and it stays usable.
        assert (await log_in(client, code, Origin="http://evil.example")).status_code == 403
        begun = await log_in(client, code)
        assert begun.status_code == 201, begun.text
        assert begun.json()["name"] == "local" and code not in begun.headers["set-cookie"]
        assert (await client.get("/api/v1/keys")).status_code == 200
        # The session alone changes nothing: the token of its page is needed.
        assert (await client.post("/api/v1/keys", json={"name": "x", "scopes": ["read"]})).status_code == 403
        client.cookies.clear()
        again = await log_in(client, code)
        assert (again.status_code, again.json()["code"]) == (401, "link_invalid")
        async with served(create_app(fresh_fleet.settings), with_key=False) as other:
            assert (await log_in(other, code)).json()["code"] == "link_invalid"
        guessed = code[:-64] + "0" * 64
        assert (await log_in(client, guessed)).json()["code"] == "link_invalid"


@sqlite_only
async def test_a_link_expires_and_ends_with_its_key(
    fresh_fleet: Fleet, services: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with served(create_app(fresh_fleet.settings), with_key=False) as client:
        key = LocalKey.open(services.settings)
        monkeypatch.setattr("nekro.gateway.access.signed_texts.CODE_SECONDS", -1)
        late = make_code(services.settings, key_id=key.id)
        monkeypatch.undo()
        assert (await log_in(client, late)).json()["code"] == "link_invalid"
        other = make_code(services.settings, key_id="0" * 16)
        assert (await log_in(client, other)).json()["code"] == "link_invalid"


async def test_no_link_is_accepted_while_redis_does_not_answer(make_settings: Callable[..., Any]) -> None:
    settings = make_settings(broker={"url": f"redis://127.0.0.1:{free_port()}/0"})
    codes = LoginCodes(settings)
    try:
        with pytest.raises(RefusedError) as caught:
            await codes.take(make_code(settings, key_id="0" * 16))
        assert caught.value.code == "broker_unavailable"
    finally:
        await codes.close()
