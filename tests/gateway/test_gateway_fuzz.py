"""Schemathesis against a running gateway: no request gets a 5xx, and answers fit the OpenAPI document.

The seed is printed with each failure; ``NEKRO_TEST_FUZZ_SEED`` repeats a run, ``NEKRO_TEST_FUZZ_EXAMPLES``
sets the number of examples of each operation.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from worker_fleet import build_fleet

from gateway.identity import Scope
from gateway.openapi import document

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

ROOT = Path(__file__).parent.parent.parent
CHECKS = "not_a_server_error,response_schema_conformance,content_type_conformance,status_code_conformance"


def test_no_request_of_the_fuzzer_gets_a_server_error(redis_server: Any, tmp_path: Path) -> None:
    seed = os.environ.get("NEKRO_TEST_FUZZ_SEED") or str(random.randrange(1 << 32))
    examples = os.environ.get("NEKRO_TEST_FUZZ_EXAMPLES", "5")
    phases = os.environ.get("NEKRO_TEST_FUZZ_PHASES", "fuzzing")
    database = f"sqlite:///{tmp_path / 'nekro.db'}"
    fleet = build_fleet(
        tmp_path,
        redis_server.url,
        database,
        gateway={"requests_per_minute": 0},
        plugins={"load_shipped": False},
    )
    (tmp_path / "openapi.json").write_text(document(), "utf-8")
    scopes = [word for scope in Scope for word in ("--scope", scope.value)]
    key = fleet.run("keys", "create", "fuzzer", *scopes).stdout.strip()
    gateway = fleet.command("gateway", "--port", "0", "--json")
    try:
        assert gateway.stdout is not None
        text = ""
        while not text.rstrip().endswith("}"):
            text += gateway.stdout.readline()
        command = [
            str(Path(sys.executable).with_name("st")), "run", str(tmp_path / "openapi.json"),
            "--url", json.loads(text)["url"], "--phases", phases, "--checks", CHECKS,
            "--max-examples", examples, "--workers", "4", "--seed", seed, "--generation-database", "none",
            # Streams do not end.
            "--exclude-path-regex", "/events$", "--no-color", "--continue-on-failure",
            "--suppress-health-check", "all", "--header", f"Authorization: Bearer {key}",
        ]  # fmt: skip
        done = subprocess.run(
            command,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=800,
        )
    finally:
        gateway.terminate()
        gateway.communicate(timeout=60)
    assert done.returncode == 0, f"seed {seed}\n{done.stdout[-20000:]}\n{done.stderr[-2000:]}"
