"""The console's files and sessions: what a browser gets, and what other pages do not."""

from __future__ import annotations

import dataclasses
from datetime import timedelta
from typing import Any

import httpx
import pytest
from event_reader import frames
from gateway_server import served
from local_key import local_headers
from worker_fleet import Fleet

from broker_config.secret_files import secret_path
from nekro.app.chats.events import record
from nekro.app.services import Services
from nekro.base.release import release
from nekro.gateway.access import sessions
from nekro.gateway.app import create_app
from nekro.operations.actor import Scope
from nekro.operations.keys import new_key, revoke_stored_key, store_key
from nekro_agent.shared_clock import shared_time
from storage.repositories.events import NewEvent

CHAT = "group_1/ü x"
EVENTS = "/api/v1/chats/group_1%2F%C3%BC%20x/events?after=0"


@dataclasses.dataclass
class Browser:
    """Sends what a browser's page sends."""

    http: httpx.AsyncClient
    csrf_token: str = ""

    @property
    def origin(self) -> str:
        return str(self.http.base_url).rstrip("/")

    @property
    def own(self) -> dict[str, str]:
        return {"Origin": self.origin, "Sec-Fetch-Site": "same-origin"}

    async def log_in(self, key: str) -> httpx.Response:
        answer = await self.http.post("/console/session", json={"key": key}, headers=self.own)
        self.csrf_token = answer.json().get("csrf_token") or ""
        return answer

    async def act(self, **headers: str) -> tuple[int, str]:
        """Create a key with the session; returns status and code."""
        sent = {**self.own, "X-Nekro-CSRF": self.csrf_token, **headers}
        sent = {name: value for name, value in sent.items() if value}
        answer = await self.http.post("/api/v1/keys", json={"name": "x", "scopes": ["read"]}, headers=sent)
        return answer.status_code, answer.json().get("code", "")


async def make_key(services: Services, *scopes: Scope, **limits: Any) -> tuple[str, str]:
    new, key = new_key("Ada", scopes=scopes or tuple(Scope), **limits)
    await store_key(services.database, new, by=None, request_id=None)
    return new.id, key


@pytest.mark.extended
async def test_a_browser_logs_in_with_a_key_reads_acts_and_logs_out(
    fresh_fleet: Fleet, services: Services
) -> None:
    key_id, key = await make_key(services)
    async with services.database.begin() as tx:
        await tx.chats.ensure(CHAT)
        record(tx, services.publisher, CHAT, NewEvent(type="call.ended"))
    async with served(create_app(fresh_fleet.settings), with_key=False) as http:
        browser = Browser(http)
        assert (await http.get("/console/session")).status_code == 401
        answer = await browser.log_in(key)
        assert answer.status_code == 201, answer.text
        cookie = answer.headers["set-cookie"]
        assert {"HttpOnly", "SameSite=strict", "Path=/"} <= {part.strip() for part in cookie.split(";")}
        assert "Secure" not in cookie and key not in cookie and key not in answer.text
        who = (await http.get("/console/session")).json()
        assert (who["key_id"], who["name"], who["chats"]) == (key_id, "Ada", "*")
        assert set(who["scopes"]) == set(Scope) and who["csrf_token"] == browser.csrf_token
        assert (await http.get("/api/v1/keys")).json()["items"][0]["id"] == key_id
        async with http.stream("GET", EVENTS, headers={"Sec-Fetch-Site": "same-origin"}) as response:
            assert response.status_code == 200
            assert (await anext(aiter(frames(response)))).id == 1
        assert await browser.act() == (201, "")
        acts = (await http.get("/api/v1/audit")).json()["items"]
        assert [(act["action"], act["key_id"]) for act in acts[:2]] == [
            ("key.create", key_id),
            ("console.login", key_id),
        ]
        refused = await http.delete("/console/session", headers=browser.own)
        assert (refused.status_code, refused.json()["code"]) == (403, "csrf_invalid")
        sent = {**browser.own, "X-Nekro-CSRF": browser.csrf_token}
        assert (await http.delete("/console/session", headers=sent)).status_code == 204
        assert not http.cookies and (await http.get("/api/v1/keys")).status_code == 401


async def test_behind_https_the_cookie_is_secure_and_of_one_host(
    fresh_fleet: Fleet, services: Services
) -> None:
    _, key = await make_key(services)
    async with served(create_app(fresh_fleet.settings), with_key=False) as http:
        proxied = {"Host": "localhost", "Origin": "https://localhost"}
        answer = await http.post("/console/session", json={"key": key}, headers=proxied)
        assert answer.status_code == 201, answer.text
        cookie = answer.headers["set-cookie"]
        assert cookie.startswith("__Host-nekro_console=") and "Secure" in cookie and "Domain" not in cookie
        sent = {"Cookie": cookie.partition(";")[0], "X-Nekro-CSRF": answer.json()["csrf_token"]}
        for origin, status in (("https://localhost", 201), ("http://localhost", 403)):
            made = await http.post(
                "/api/v1/keys",
                json={"name": "x", "scopes": ["read"]},
                headers={**sent, "Host": "localhost", "Origin": origin},
            )
            assert made.status_code == status, origin


async def test_a_session_acts_for_pages_of_its_own_origin_with_its_token_only(
    fresh_fleet: Fleet, services: Services
) -> None:
    _, key = await make_key(services)
    async with served(create_app(fresh_fleet.settings), with_key=False) as http:
        browser = Browser(http)
        await browser.log_in(key)
        other = Browser(http, browser.csrf_token)
        for headers, code in (
            ({"X-Nekro-CSRF": ""}, "csrf_invalid"),
            ({"X-Nekro-CSRF": "0" * 64}, "csrf_invalid"),
            ({"X-Nekro-CSRF": browser.csrf_token[:-1]}, "csrf_invalid"),
            ({"Origin": ""}, "cross_site"),
            ({"Origin": "null"}, "cross_site"),
            ({"Origin": "https://evil.example"}, "cross_site"),
            ({"Origin": browser.origin + "0"}, "cross_site"),
            ({"Origin": browser.origin.replace("http:", "https:")}, "cross_site"),
            ({"Sec-Fetch-Site": "cross-site"}, "cross_site"),
            # A page of another port of this machine.
            ({"Sec-Fetch-Site": "same-site"}, "cross_site"),
        ):
            assert await other.act(**headers) == (403, code), headers
        for headers in ({"Sec-Fetch-Site": "same-site"}, {"Origin": "http://127.0.0.1:1"}):
            assert (await http.get("/api/v1/keys", headers=headers)).status_code == 403
        assert len((await http.get("/api/v1/keys")).json()["items"]) == 1
        # A second login has another token.
        first = browser.csrf_token
        await browser.log_in(key)
        assert first != browser.csrf_token and (await browser.act(**{"X-Nekro-CSRF": first}))[0] == 403


async def test_a_site_that_may_use_keys_cannot_use_the_session(
    fresh_fleet: Fleet, services: Services
) -> None:
    _, key = await make_key(services)
    gateway = fresh_fleet.settings.gateway.model_copy(update={"cors_origins": ("http://127.0.0.1:1",)})
    async with served(
        create_app(fresh_fleet.settings.model_copy(update={"gateway": gateway})), with_key=False
    ) as http:
        browser = Browser(http)
        await browser.log_in(key)
        assert (await browser.act(Origin="http://127.0.0.1:1")) == (403, "cross_site")
        read = await http.get("/api/v1/keys", headers={"Origin": "http://127.0.0.1:1"})
        assert read.status_code == 403


async def test_a_changed_expired_doubled_or_foreign_cookie_is_refused(
    fresh_fleet: Fleet, services: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    key_id, key = await make_key(services)
    other_id, _ = await make_key(services)
    async with served(create_app(fresh_fleet.settings), with_key=False) as http:
        browser = Browser(http)
        await browser.log_in(key)
        name, text = next(iter(http.cookies.items()))
        http.cookies.clear()
        end = text.split("_")[2]

        async def status(cookie: str, **headers: str) -> int:
            return (await http.get("/api/v1/keys", headers={"Cookie": cookie, **headers})).status_code

        assert await status(f"{name}={text}") == 200
        port = browser.origin.rpartition(":")[2]
        for cookie in (
            f"{name}={text.replace(key_id, other_id)}",
            f"{name}={text.replace(f'_{end}_', f'_{int(end) + 1}_')}",
            f"{name}={text[:-1]}{'0' if text[-1] != '0' else '1'}",
            f"{name}={text.replace('_p_', '_s_')}",
            f"__Host-{name}={text}",
            f"{name}={text}; {name}={text}",
            f"{name}={text}; {name}=x",
            f"{name}=",
            f"nekro_console={text}",
            f"{name}={key}",
        ):
            assert await status(cookie) == 401, cookie
        assert await status(f"{name}={text}", Host=f"localhost:{port}") == 401
        assert await status(f"nekro_console={text}", Host="127.0.0.1") == 401
        assert await status(f"{name}={text}", Host=f"evil.example:{port}") == 421
        for path in ("/metrics", "/v1/models", "/mcp"):
            answer = await http.get(path, headers={"Cookie": f"{name}={text}"})
            assert answer.status_code == 401, path
        with monkeypatch.context() as patch:
            patch.setattr(sessions, "SESSION_SECONDS", -1)
            answer = await browser.log_in(key)
            expired = answer.headers["set-cookie"].partition(";")[0]
        assert await status(expired) == 401
        await revoke_stored_key(services.database, key_id, by=None, request_id=None)
        assert await status(f"{name}={text}") == 401


async def test_a_session_ends_with_the_expiry_of_its_key(fresh_fleet: Fleet, services: Services) -> None:
    _, key = await make_key(services, expires_at=shared_time() + timedelta(hours=1))
    async with served(create_app(fresh_fleet.settings), with_key=False) as http:
        await Browser(http).log_in(key)
        assert (await http.get("/console/session")).status_code == 200
        async with services.database.begin() as tx:
            await tx.connection.exec_driver_sql(
                "UPDATE api_keys SET expires_at = '2020-01-01 00:00:00.000000'"
            )
        assert (await http.get("/console/session")).json()["code"] == "session_invalid"


async def test_only_a_page_of_the_gateway_with_a_valid_key_logs_in(
    fresh_fleet: Fleet, services: Services
) -> None:
    key_id, key = await make_key(services)
    async with served(create_app(fresh_fleet.settings), with_key=False) as http:
        browser = Browser(http)
        for headers in (
            {},
            {"Origin": "null"},
            {"Origin": "https://evil.example"},
            {"Origin": browser.origin, "Sec-Fetch-Site": "same-site"},
        ):
            answer = await http.post("/console/session", json={"key": key}, headers=headers)
            assert (answer.status_code, answer.json()["code"]) == (403, "cross_site"), headers
        for wrong in ("nk_", key[:-1], key + "x", f"nk_{key_id}_{'A' * 43}", "é", "nk_" + "0" * 150):
            answer = await browser.log_in(wrong)
            assert (answer.status_code, answer.json()["code"]) == (401, "key_invalid"), wrong
            assert wrong not in answer.text or wrong == "nk_"
        form = await http.post("/console/session", content=f'{{"key": "{key}"}}', headers=browser.own)
        assert form.status_code == 422  # what a form of another site could send without being asked
        assert not http.cookies


async def test_a_session_has_the_rights_of_its_key_only(fresh_fleet: Fleet, services: Services) -> None:
    _, key = await make_key(services, Scope.READ, chats="group_2*")
    async with served(create_app(fresh_fleet.settings), with_key=False) as http:
        browser = Browser(http)
        await browser.log_in(key)
        assert await browser.act() == (403, "scope_missing")
        assert (await http.get(EVENTS)).status_code == 404


async def test_a_gateway_on_loopback_needs_a_login_too(fresh_fleet: Fleet, services: Services) -> None:
    async with served(create_app(fresh_fleet.settings), with_key=False) as http:
        for path in ("/console/session", "/api/v1/keys"):
            assert (await http.get(path)).status_code == 401
            foreign = {"Origin": "http://127.0.0.1:1", "Sec-Fetch-Site": "same-site"}
            assert (await http.get(path, headers=foreign)).status_code == 403
        browser = Browser(http)
        local = local_headers(services.settings.data_dir)["Authorization"].removeprefix("Bearer ")
        begun = await browser.log_in(local)
        assert begun.status_code == 201, begun.text
        who = (await http.get("/console/session")).json()
        assert (who["key_id"], who["name"]) == (None, "local") and set(who["scopes"]) == set(Scope)
        assert (await browser.act())[0] == 201
        # The session ends when the file has another key.
        secret_path(services.settings.data_dir, "api.key").unlink()
    async with served(create_app(fresh_fleet.settings), with_key=False) as http:
        port = http.base_url.port
        cookie = "; ".join(f"nekro_console_{port}={text}" for text in browser.http.cookies.values())
        assert (await http.get("/api/v1/keys", headers={"Cookie": cookie})).status_code == 401


async def test_sessions_are_refused_beside_active_pages_of_plugins(
    fresh_fleet: Fleet, services: Services
) -> None:
    _, key = await make_key(services)
    async with served(create_app(fresh_fleet.settings), with_key=False) as http:
        await Browser(http).log_in(key)
        cookie = "; ".join(f"{name}={text}" for name, text in http.cookies.items())
        port = str(http.base_url.port)
    for update, code in (
        ({"plugin_http": ("Ada.shop=key", "Ada.site=open")}, "console_shares_origin"),
        ({"plugin_http": ("*=plugin",)}, "console_shares_origin"),
        ({"console": False}, "console_off"),
    ):
        gateway = fresh_fleet.settings.gateway.model_copy(update=update)
        async with served(
            create_app(fresh_fleet.settings.model_copy(update={"gateway": gateway})), with_key=False
        ) as http:
            answer = await Browser(http).log_in(key)
            assert (answer.status_code, answer.json()["code"]) == (403, code)
            read = await http.get("/api/v1/keys", headers={"Cookie": cookie, "Host": f"127.0.0.1:{port}"})
            assert (read.status_code, read.json()["code"]) == (403, code)


async def test_the_console_is_served_with_a_strict_policy_and_validators(gateway: Any) -> None:
    _, http = gateway
    answer = await http.get("/console/")
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/html")
    policy = dict(part.split(" ", 1) for part in answer.headers["content-security-policy"].split("; "))
    assert policy == {
        "default-src": "'none'",
        "script-src": "'self'",
        "style-src": "'self'",
        "img-src": "'self' blob:",
        "connect-src": "'self'",
        "font-src": "'self'",
        "frame-ancestors": "'none'",
        "base-uri": "'none'",
        "form-action": "'self'",
        "require-trusted-types-for": "'script'",
        "trusted-types": "'none'",
    }
    assert answer.headers["x-content-type-options"] == "nosniff"
    etag = answer.headers["etag"]
    again = await http.get("/console/", headers={"If-None-Match": etag})
    assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", etag)
    head = await http.head("/console/")
    assert (head.status_code, head.headers["content-length"]) == (200, str(len(answer.content)))
    for path in ("/", "/console"):
        entry = await http.get(path)
        assert (entry.status_code, entry.headers["location"]) == (307, "/console/"), path
    page = {"Accept": "text/html,application/xhtml+xml"}
    for path in ("/console/turns/1", "/console/chats/group_1%2Fa.b", "/console/x.js"):
        shown = await http.get(path, headers=page)
        assert (shown.status_code, shown.content) == (200, answer.content), path
        assert (await http.get(path)).status_code == 404, path
    for path in ("/console/..%2F__init__.py", "/console/../session.py", "/console/%2e%2e/files.py"):
        assert (await http.get(path)).status_code == 404, path
        assert b"import" not in (await http.get(path, headers=page)).content
    assert (await http.get("/consolex", headers=page)).status_code == 404


async def test_the_console_can_be_switched_off(fresh_fleet: Fleet) -> None:
    gateway = fresh_fleet.settings.gateway.model_copy(update={"console": False})
    async with served(
        create_app(fresh_fleet.settings.model_copy(update={"gateway": gateway})), with_key=False
    ) as http:
        for path in ("/", "/console", "/console/", "/console/index.html"):
            assert (await http.get(path)).status_code == 404


@pytest.mark.extended
async def test_the_reference_of_the_api_is_open_as_the_console_is(fresh_fleet: Fleet) -> None:
    async with served(create_app(fresh_fleet.settings), with_key=False) as http:
        console = await http.get("/console/")
        page = await http.get("/reference")
        origin = str(http.base_url).rstrip("/")
        policy = "content-security-policy"
        assert (page.status_code, page.headers[policy]) == (200, console.headers[policy])
        assert f"URL={origin}\n" in page.text and release() in page.text
        assert 'id="list_jobs"' in page.text and "gateway-address" not in page.text
        again = await http.get("/reference", headers={"If-None-Match": page.headers["etag"]})
        assert again.status_code == 304
        assert (await http.head("/reference")).headers["content-length"] == str(len(page.content))
    gateway = fresh_fleet.settings.gateway.model_copy(update={"console": False})
    settings = fresh_fleet.settings.model_copy(update={"gateway": gateway})
    async with served(create_app(settings), with_key=False) as http:
        refused = await http.get("/reference")
        assert (refused.status_code, refused.json()["code"]) == (404, "console_off")
