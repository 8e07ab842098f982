"""`nekro up` serves the HTTP API."""

from __future__ import annotations

import contextlib
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from forked_process import ForkedCommand
from local_key import local_headers
from waiting import WAIT_SECONDS
from worker_fleet import Fleet

from broker_config.settings import BrokerSettings

pytestmark = pytest.mark.extended


@contextlib.contextmanager
def running_up(fleet: Fleet, *, workers: str = "methods-1") -> Iterator[tuple[ForkedCommand, str]]:
    """A `nekro up` that starts these workers, and the URL that it prints."""
    with fleet.command("up", "--methods", "1", "--long", "0") as up:
        try:
            assert up.stderr is not None
            lines: list[str] = []
            while not any("ready: " in line for line in lines):
                line = up.stderr.readline()
                assert line, lines
                lines.append(line)
            found = re.search(
                rf"ready: {workers}; HTTP API on (http://127\.0\.0\.1:[0-9]+); key in (\S+); "
                r"console on (\S+) \(once, within 10 minutes\); Ctrl-C",
                lines[-1],
            )
            assert found is not None, lines[-1]
            assert Path(found[2]) == fleet.settings.data_dir / "secrets" / "api.key"
            assert found[3].startswith(f"{found[1]}/console/#/login?code=nl_")
            assert httpx.get(found[3], timeout=WAIT_SECONDS).is_success
            yield up, found[1]
        finally:
            if up.poll() is None:
                up.send_signal(signal.SIGINT)
            up.communicate(timeout=WAIT_SECONDS)


def gateway_of(up: ForkedCommand) -> int:
    """The process id of the gateway that it has started."""
    children = Path(f"/proc/{up.pid}/task/{up.pid}/children").read_text().split()
    (pid,) = (int(pid) for pid in children if Path(f"/proc/{pid}/comm").read_text() == "gateway\n")
    return pid


@pytest.mark.parametrize("fresh_fleet", ["sqlite"], indirect=True)
def test_starts_a_gateway_and_prints_its_url(fresh_fleet: Fleet) -> None:
    with running_up(fresh_fleet) as (up, url):
        key = local_headers(fresh_fleet.settings.data_dir)
        methods = httpx.get(
            f"{url}/api/v1/methods", params={"text": "Ada.operated"}, headers=key, timeout=WAIT_SECONDS
        )
        assert "echo" in [method["name"] for method in methods.json()["items"]]
        body = {"method": "echo", "args": [1], "chat_key": "c"}
        called = httpx.post(f"{url}/api/v1/calls", json=body, headers=key, timeout=WAIT_SECONDS)
        assert called.json()["value"] == 1
        with running_up(fresh_fleet_beside(fresh_fleet)) as (_, other):
            assert other != url
            assert httpx.get(f"{other}/healthz", timeout=WAIT_SECONDS).is_success

        os.kill(gateway_of(up), signal.SIGKILL)
        # Not refused: the socket is open while the gateway is started again.
        assert httpx.get(f"{url}/healthz", timeout=WAIT_SECONDS).is_success
        up.send_signal(signal.SIGINT)
        up.communicate(timeout=WAIT_SECONDS)
        assert up.returncode == 0
        with pytest.raises(httpx.TransportError):
            httpx.get(f"{url}/healthz")


def fresh_fleet_beside(fleet: Fleet) -> Fleet:
    """The same system with a data directory of its own, as a second one on this host."""
    data_dir = fleet.settings.data_dir.with_name("second")
    return Fleet(fleet.settings.model_copy(update={"data_dir": data_dir}), data_dir.parent)


@pytest.mark.parametrize("fresh_fleet", ["sqlite"], indirect=True)
def test_without_a_language_model_code_runs_and_turns_fail(fresh_fleet: Fleet, tmp_path: Path) -> None:
    settings = fresh_fleet.settings
    assert settings.llm.script is None and settings.llm.base_url is None
    # On a broker of its own, as the test above: another host might have a model.
    alone = Fleet(settings.model_copy(update={"broker": BrokerSettings()}), settings.data_dir.parent)
    with (
        running_up(alone, workers="methods-1, rounds-1") as (_, url),
        httpx.Client(
            base_url=f"{url}/api/v1/", headers=local_headers(alone.settings.data_dir), timeout=WAIT_SECONDS
        ) as api,
    ):
        body = {"code": "print(echo(6) * 7)", "chat_key": "c"}
        assert api.post("runs", json=body).json()["output"] == "42\n"
        code = tmp_path / "code.py"
        code.write_text("print(echo(5))")
        done = alone.run("exec", str(code), variables={"NEKRO_URL": url})
        assert done.returncode == 0 and done.stdout.startswith("5\n"), done.stderr
        posted = api.post(
            "chats/c/messages", params={"wait": WAIT_SECONDS}, json={"text": "hello", "user_id": "u"}
        )
        turn = api.get(f"turns/{posted.json()['turn_id']}").json()
        assert turn["state"] == "failed"
        assert "NEKRO_LLM__BASE_URL" in turn["error"]["text"]
