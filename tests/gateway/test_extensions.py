"""Extensions: each can be left out, and a name that none has is an error."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from gateway_server import served
from nekro_inside import run_inside
from worker_fleet import Fleet

import nekro.extensions
from broker_config.settings import McpSettings, Settings
from nekro.app.chats.writer import append_message
from nekro.app.extensions import imported, loaded
from nekro.app.services import Services
from nekro.base.release import extension_names
from nekro.cli.environment import environment_of
from nekro.cli.running import ExitCode
from nekro.gateway.app import create_app
from nekro.gateway.document.openapi import document
from nekro_agent.errors import SettingsError
from nekro_agent.ports import MessageKind
from storage.repositories.messages import NewMessage

#: A path of each extension, which answers something else than 404 while the extension is there.
PATHS = {
    "mcp": ("POST", "/mcp"),
    "openai": ("GET", "/v1/models"),
    "plugin_pages": ("POST", "/api/webhook/{endpoint}"),
    "sse_adapter": ("POST", "/api/v1/adapters/sse/requests"),
    "webhooks": ("GET", "/api/v1/webhooks"),
}
#: Paths in the document by the extension that serves them.
DOCUMENTED = {
    "mcp": "/api/v1/mcp/servers",
    "openai": "/v1/chat/completions",
    "plugin_pages": "/api/webhook/{endpoint}",
    "sse_adapter": "/api/adapters/sse/connect",
    "webhooks": "/api/v1/webhooks",
}


@pytest.fixture(scope="module")
def database_url(sqlite_url: str) -> str:
    """One kind of database: `test_sse_adapter` passes messages of a chat platform through both."""
    return sqlite_url


def without(name: str, settings: Settings) -> Settings:
    """The settings that leave out one extension."""
    return settings.model_copy(update={"extensions": tuple(sorted(PATHS.keys() - {name}))})


def test_every_extension_is_listed() -> None:
    assert set(PATHS) == set(DOCUMENTED) == set(extension_names())


@pytest.mark.one_python
@pytest.mark.parametrize("name", PATHS)
async def test_each_extension_can_be_left_out(name: str, fleet: Fleet) -> None:
    settings = without(name, fleet.settings)
    app = create_app(settings)
    async with served(app) as client:
        found = {one: (await client.request(*PATHS[one])).text for one in PATHS}
        loaded = {one for one, text in found.items() if "nothing is served there" not in text}
    assert loaded == PATHS.keys() - {name}
    paths = json.loads(document(app))["paths"]
    assert {one for one, path in DOCUMENTED.items() if path in paths} == loaded


@pytest.mark.parametrize("name", ["mcp", "plugin_pages"])
def test_a_worker_starts_without_an_extension(name: str, fleet: Fleet, tmp_path: Path) -> None:
    workers = Fleet(without(name, fleet.settings), tmp_path)
    try:
        workers.start("methods")
    finally:
        workers.stop()


@pytest.mark.parametrize("name", PATHS)
def test_commands_run_without_an_extension(name: str, fleet: Fleet, tmp_path: Path) -> None:
    environ = environment_of(without(name, fleet.settings))
    subprocess.run([sys.executable, "-m", "nekro.cli.main", "--help"], env=environ, check=True)
    code, _, err = run_inside("mcp", "list", directory=tmp_path, environment=environ)
    assert (code == ExitCode.USAGE) == (name == "mcp"), err
    assert ("of the extension mcp, which NEKRO_EXTENSIONS leaves out" in err) == (name == "mcp")


def test_none_is_no_extension() -> None:
    settings = Settings(extensions=("none",))
    assert not any(settings.loads_extension(name) for name in extension_names())
    assert all(Settings().loads_extension(name) for name in extension_names())


def test_an_unknown_extension_is_an_error_with_a_suggestion() -> None:
    with pytest.raises(SettingsError, match="NEKRO_EXTENSIONS: 'webhook' is not an extension; did you mean"):
        Settings.load(env_file=None, extensions="mcp,webhook")


async def test_doctor_checks_what_an_extension_states(fleet: Fleet, tmp_path: Path) -> None:
    """A server that cannot be used is a warning; without servers there is no line."""
    (check_of,) = [one.checks for one in loaded(fleet.settings) if one.checks is not None]
    file = tmp_path / "mcp.json"
    settings = fleet.settings.model_copy(update={"mcp": McpSettings(file=file)})
    assert await imported(check_of)(settings) == []
    for declared, verdict in (({"url": "https://mcp.example.org/mcp"}, "ok"), ({"url": 1}, "warning")):
        file.write_text(json.dumps({"mcpServers": {"tracker": declared}}), "utf-8")
        (check,) = await imported(check_of)(settings)
        assert (check.name, check.verdict) == ("mcp", verdict), check


@pytest.fixture
def telegraph(monkeypatch: pytest.MonkeyPatch) -> None:
    """An installation with one more extension, which the tests have."""
    folders = [*nekro.extensions.__path__, str(Path(__file__).parent / "extensions")]
    monkeypatch.setattr(nekro.extensions, "__path__", folders)


async def test_a_chat_platform_is_an_extension(telegraph: None, fleet: Fleet) -> None:
    """The product does not know it: what it receives begins a turn, and it gets what the agent sends."""
    app = create_app(fleet.settings)
    async with served(app) as client:
        assert (await client.post("/telegraph/berlin", params={"text": "stop"})).json() == 1
        (round_,) = (await client.get("/api/v1/chats/telegraph-berlin/rounds")).json()["items"]
        assert await answered(app.state.services, "telegraph-berlin", "received") == "received"
        assert await answered(app.state.services, "elsewhere-berlin", "received") == "received"
        assert (await client.get("/telegraph/berlin")).json() == ["received"]
        office = next(one for one in app.state.running.values() if type(one).__name__ == "Office")
        assert round_["state"] == "requested" and office.is_open
    assert not office.is_open


def test_examples_of_an_extension_are_in_the_document(telegraph: None, fleet: Fleet) -> None:
    paths = json.loads(document(create_app(fleet.settings)))["paths"]
    fetch = paths["/telegraph/{office}"]["get"]
    assert fetch["parameters"][0]["example"] == "berlin"
    assert fetch["responses"]["200"]["content"]["application/json"]["example"] == ["It rains in Berlin"]


async def test_nothing_is_queued_for_an_extension_that_is_left_out(telegraph: None, fleet: Fleet) -> None:
    async with served(create_app(without("telegraph", fleet.settings))) as client:
        assert (await client.get("/telegraph/london")).status_code == 404
    services = Fleet(without("telegraph", fleet.settings), fleet.directory).services()
    await services.start()
    try:
        await answered(services, "telegraph-london", "received")
    finally:
        await services.close()
    async with served(create_app(fleet.settings)) as client:
        assert (await client.get("/telegraph/london")).json() == []


async def test_an_extension_reads_settings_of_its_own(
    telegraph: None, fleet: Fleet, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As those of the core: from a file, with bounds, redacted, and handed on to child processes."""
    (tmp_path / "key").write_text("dot-dash\n", "utf-8")
    monkeypatch.setenv("NEKRO_TELEGRAPH__KEY_FILE", str(tmp_path / "key"))
    monkeypatch.setenv("NEKRO_TELEGRAPH__MAX_WORDS", "2")
    settings = Settings.load(env_file=None)
    assert "dot-dash" in settings.secret_values()
    assert environment_of(settings, {})["NEKRO_TELEGRAPH__KEY"] == "dot-dash"
    group = settings.telegraph  # type: ignore[attr-defined]
    own = fleet.settings.model_copy(update={"telegraph": group})
    async with served(create_app(own)) as client:
        path = "/telegraph/rome"
        assert (await client.post(path, params={"text": "stop"})).status_code == 401
        known = {"key": "dot-dash"}
        assert (await client.post(path, params=known | {"text": "a b c"})).status_code == 422
        assert (await client.post(path, params=known | {"text": "a b"})).json() == 1
    monkeypatch.setenv("NEKRO_TELEGRAPH__MAX_WORDS", "0")
    with pytest.raises(SettingsError, match=r"NEKRO_TELEGRAPH__MAX_WORDS: .*; it is '0'"):
        Settings.load(env_file=None)
    monkeypatch.delenv("NEKRO_TELEGRAPH__MAX_WORDS")
    monkeypatch.setenv("NEKRO_TELEGRAPH__MAX_WORD", "2")
    with pytest.raises(SettingsError, match="Did you mean NEKRO_TELEGRAPH__MAX_WORDS"):
        Settings.load(env_file=None)


def test_the_settings_of_an_extension_that_is_not_installed_are_unknown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("NEKRO_TELEGRAPH__MAX_WORDS", "2")
    with pytest.raises(SettingsError, match="Unknown setting NEKRO_TELEGRAPH__MAX_WORDS"):
        Settings.load(env_file=None)


async def answered(services: Services, chat_key: str, text: str) -> str:
    """Write a message of the agent."""
    new = NewMessage(chat_key=chat_key, kind=MessageKind.ASSISTANT, text=text)
    async with services.database.begin() as transaction:
        return (await append_message(transaction, services.publisher, new)).text
