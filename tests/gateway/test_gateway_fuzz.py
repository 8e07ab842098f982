"""Schemathesis against a running gateway: no request gets a 5xx, and answers fit the OpenAPI document.

All phases run: examples, boundary values of every parameter (coverage), random data (fuzzing), and sequences
of operations whose answers name things for the next ones (stateful). The seed is printed with each failure;
``NEKRO_TEST_FUZZ_SEED`` repeats a run, ``NEKRO_TEST_FUZZ_EXAMPLES`` sets the number of examples of each
operation, ``NEKRO_TEST_FUZZ_PHASES`` chooses phases.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from gateway_process import GatewayProcess
from worker_fleet import Fleet, build_fleet

from broker_config.settings import Settings
from nekro.gateway.app import create_app
from nekro.gateway.document.openapi import document
from nekro.operations.actor import Scope

pytestmark = pytest.mark.extended

ROOT = Path(__file__).parent.parent.parent
CHECKS = "not_a_server_error,response_schema_conformance,content_type_conformance,status_code_conformance"


#: Requests with these fields wait so long, at most; there are no workers for them.
WAITS = ("wait", "timeout_seconds")
MOST_WAIT_SECONDS = 0.5
#: Runs have a worker. One that ends at its deadline is answered with 504, which the gateway does not cause.
LEAST_RUN_SECONDS = 50


@pytest.mark.parametrize(
    ("phases", "examples", "scopes"),
    [
        pytest.param("examples,fuzzing,stateful", 1, tuple(Scope), marks=pytest.mark.timeout(600)),
        # An application's key, whose lists and costs are its own.
        pytest.param(
            "examples,fuzzing,stateful", 3, (Scope.READ, Scope.POST),
            marks=[pytest.mark.slow, pytest.mark.timeout(3000)],
        ),
        pytest.param(
            "examples,coverage,fuzzing,stateful", 20, tuple(Scope),
            marks=[pytest.mark.slow, pytest.mark.timeout(3000)],
        ),
    ],
    ids=("brief", "application", "long"),
)  # fmt: skip
def test_no_request_of_the_fuzzer_gets_a_server_error(
    redis_server: Any, tmp_path: Path, phases: str, examples: int, scopes: tuple[Scope, ...]
) -> None:
    seed = os.environ.get("NEKRO_TEST_FUZZ_SEED") or str(random.randrange(1 << 32))
    phases = os.environ.get("NEKRO_TEST_FUZZ_PHASES") or phases
    most = os.environ.get("NEKRO_TEST_FUZZ_EXAMPLES") or str(examples)
    database = f"sqlite:///{tmp_path / 'nekro.db'}"
    (tmp_path / "script.yaml").write_text("- when: '.*'\n  answer: 'Well.'\n", "utf-8")
    fleet = build_fleet(
        tmp_path,
        redis_server.url,
        database,
        gateway={"requests_per_minute": 0},
        plugins={"load_shipped": False},
        llm={"script": tmp_path / "script.yaml"},
    )
    (tmp_path / "openapi.json").write_text(
        json.dumps(patient(bounded(json.loads(document(create_app(Settings.model_construct())))))), "utf-8"
    )
    may = [word for scope in scopes for word in ("--scope", scope.value)]
    key = fleet.run("keys", "create", "fuzzer", *may).stdout.strip()
    fleet.start("rounds")  # which run the code of `POST /runs`
    with closed(fleet), GatewayProcess(fleet) as gateway:
        command = [
            str(Path(sys.executable).with_name("st")), "run", str(tmp_path / "openapi.json"),
            "--url", gateway.url, "--phases", phases, "--checks", CHECKS,
            "--max-examples", most, "--workers", "1", "--seed", seed, "--generation-database", "none",
            # Streams do not end, and no worker here runs the hooks of plugins. One worker: generating data on
            # several threads fails now and then in Hypothesis itself (KeyError in its cache of sources).
            "--exclude-path-regex", "/(events|changes|config)$", "--request-timeout", "60", "--no-color",
            "--continue-on-failure", "--suppress-health-check", "all",
            "--header", f"Authorization: Bearer {key}",
        ]  # fmt: skip
        done = subprocess.run(
            command,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=2900,
        )
    assert done.returncode == 0, f"seed {seed}\n{done.stdout[-20000:]}\n{done.stderr[-2000:]}"


@contextlib.contextmanager
def closed(fleet: Fleet) -> Iterator[None]:
    """Stop the fleet's workers at the end."""
    try:
        yield
    finally:
        fleet.stop()


def patient(openapi: dict[str, Any]) -> dict[str, Any]:
    """Return the document with runs that have time to end."""
    field = openapi["components"]["schemas"]["RunBody"]["properties"]["timeout_seconds"]
    field["anyOf"] = [{"type": "number", "minimum": LEAST_RUN_SECONDS}, {"type": "null"}]
    return openapi


def bounded(value: Any, most: float | None = None) -> Any:
    """Return the document, or a part of it whose numbers are at most ``most``, with short waits only."""
    if isinstance(value, list):
        return [bounded(item, most) for item in value]
    if not isinstance(value, dict):
        return value
    if most is not None and value.get("type") == "number":
        value = {**value, "maximum": most}
    if value.get("name") in WAITS:
        most = MOST_WAIT_SECONDS
    return {key: bounded(item, MOST_WAIT_SECONDS if key in WAITS else most) for key, item in value.items()}
