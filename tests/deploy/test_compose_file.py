"""What compose.yaml promises, read from the file; `make compose-test` runs it."""

from __future__ import annotations

import json
import os
import re
import stat
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from broker_config.settings import known_variables
from cli.main import build_parser
from nekro_agent.methods import Lane

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "compose.yaml").read_text("utf-8")
FILE: dict[str, Any] = yaml.safe_load(TEXT)
SERVICES: dict[str, Any] = FILE["services"]
OURS = [name for name, service in SERVICES.items() if "build" in service]


def test_it_holds_every_part() -> None:
    assert {"redis", "postgres", "migrate", "flower", "metrics", *(lane.value for lane in Lane)} <= set(
        SERVICES
    )


@pytest.mark.parametrize("name", OURS)
def test_a_service_of_ours_is_unprivileged_and_runs_a_command_that_exists(name: str) -> None:
    service = SERVICES[name]
    assert service["read_only"] and service["cap_drop"] == ["ALL"]
    assert "no-new-privileges:true" in service["security_opt"]
    assert not service.get("privileged") and "container_name" not in service  # it must scale
    build_parser().parse_args(service["command"])


@pytest.mark.parametrize("name", [lane.value for lane in Lane])
def test_a_worker_is_probed_restarted_and_given_time_to_end(name: str) -> None:
    service = SERVICES[name]
    assert service["healthcheck"]["test"] == ["CMD", "nekro", "worker", "--check"]
    assert service["restart"] == "unless-stopped"
    assert int(service["stop_grace_period"].rstrip("s")) > 30  # NEKRO_WORKERS__DRAIN_SECONDS
    assert service["depends_on"]["migrate"] == {"condition": "service_completed_successfully"}


@pytest.mark.parametrize("name", sorted(SERVICES))
def test_an_image_is_pinned_and_can_be_replaced(name: str) -> None:
    found = re.fullmatch(
        r"\$\{[A-Z_]+:-(?P<name>[\w./-]+):(?P<tag>[\w.-]+)(@sha256:[0-9a-f]{64})?\}", SERVICES[name]["image"]
    )
    assert found is not None and re.search(r"\d", found["tag"]) and found["tag"] != "latest"


def test_every_secret_is_a_file_that_must_be_named() -> None:
    for secret in FILE["secrets"].values():
        assert secret["file"].startswith("${WORKERS_SECRETS:?")
    assert set(re.findall(r"/run/secrets/(\w+)", TEXT)) == set(FILE["secrets"])


def test_every_setting_that_is_named_exists() -> None:
    known = {variable for variable, _, _ in known_variables()}
    named = {name for service in SERVICES.values() for name in service.get("environment", {})}
    ours = {name.removesuffix("_FILE") for name in named if name.startswith("NEKRO_")}
    assert ours <= known


def test_only_flower_is_published_and_only_to_this_machine() -> None:
    published = {name: service["ports"] for name, service in SERVICES.items() if "ports" in service}
    assert list(published) == ["flower"]
    assert published["flower"][0].startswith("127.0.0.1:")
    assert FILE["networks"]["backend"] == {"internal": True}


def test_the_seccomp_profile_denies_by_name_and_leaves_namespaces_alone() -> None:
    profile = json.loads((ROOT / "deploy" / "seccomp.json").read_text("utf-8"))
    denied = {name for rule in profile["syscalls"] for name in rule["names"]}
    assert {rule["action"] for rule in profile["syscalls"]} == {"SCMP_ACT_ERRNO"}
    assert {"bpf", "ptrace", "kexec_load", "init_module", "keyctl", "io_uring_setup"} <= denied
    assert not denied & {"clone", "clone3", "unshare", "mount", "pivot_root", "seccomp", "prctl"}


def test_secrets_are_random_closed_to_others_and_kept(tmp_path: Path) -> None:
    def make() -> dict[str, str]:
        subprocess.run(
            [ROOT / "scripts" / "make-secrets", tmp_path / "secrets"],
            env={**os.environ, "WORKERS_SECRETS": "given"},
            check=True,
            capture_output=True,
        )
        return {path.name: path.read_text() for path in (tmp_path / "secrets").iterdir()}

    first = make()
    assert set(first) == set(FILE["secrets"])
    assert len(set(first.values())) == len(first) and all(len(value) >= 64 for value in first.values())
    assert stat.S_IMODE((tmp_path / "secrets").stat().st_mode) == 0o700
    assert make() == first
