"""`nekro up` serves the HTTP API."""

from __future__ import annotations

import re
import signal

import httpx
import pytest
from waiting import WAIT_SECONDS
from worker_fleet import Fleet


@pytest.mark.parametrize("fresh_fleet", ["sqlite"], indirect=True)
def test_starts_a_gateway_and_prints_its_url(fresh_fleet: Fleet) -> None:
    up = fresh_fleet.command("up", "--methods", "1", "--long", "0", "--rounds", "0")
    try:
        assert up.stderr is not None
        lines: list[str] = []
        while not any("ready: " in line for line in lines):
            line = up.stderr.readline()
            assert line, lines
            lines.append(line)
        found = re.search(
            r"ready: methods-1; HTTP API on (http://127\.0\.0\.1:[0-9]+); Ctrl-C stops", lines[-1]
        )
        assert found is not None, lines[-1]
        methods = httpx.get(f"{found[1]}/api/v1/methods", params={"text": "Ada.operated"})
        assert "echo" in [method["name"] for method in methods.json()["items"]]
        body = {"method": "echo", "args": [1], "chat_key": "c"}
        assert httpx.post(f"{found[1]}/api/v1/calls", json=body, timeout=WAIT_SECONDS).json()["value"] == 1
        up.send_signal(signal.SIGINT)
        up.communicate(timeout=WAIT_SECONDS)
        assert up.returncode == 0
        with pytest.raises(httpx.TransportError):
            httpx.get(f"{found[1]}/healthz")
    finally:
        if up.poll() is None:
            up.terminate()
        up.communicate(timeout=WAIT_SECONDS)
