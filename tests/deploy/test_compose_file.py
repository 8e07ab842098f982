"""Static checks of compose.yaml; `make compose-test` runs it."""

from __future__ import annotations

import json
import os
import re
import stat
import subprocess
import tempfile
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from broker_config.settings import GatewaySettings, known_variables
from nekro.cli.main import build_parser
from nekro_agent.methods import Lane

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "compose.yaml").read_text("utf-8")
FILE: dict[str, Any] = yaml.safe_load(TEXT)
SERVICES: dict[str, Any] = FILE["services"]
OURS = [name for name, service in SERVICES.items() if "build" in service]


def test_compose_file_has_every_service() -> None:
    assert {
        "redis",
        "postgres",
        "migrate",
        "flower",
        "gateway",
        "metrics",
        *(lane.value for lane in Lane),
    } <= set(SERVICES)


@pytest.mark.parametrize("name", OURS)
def test_each_own_service_is_unprivileged_and_runs_an_existing_command(name: str) -> None:
    service = SERVICES[name]
    assert service["read_only"] and service["cap_drop"] == ["ALL"]
    assert "no-new-privileges:true" in service["security_opt"]
    assert not service.get("privileged") and "container_name" not in service  # it must scale
    build_parser().parse_args(service["command"])


@pytest.mark.parametrize("name", [lane.value for lane in Lane])
def test_workers_have_health_checks_restarts_and_a_stop_grace_period(name: str) -> None:
    service = SERVICES[name]
    program = "nekro-delegate" if name == Lane.ROUNDS else "nekro"
    assert service["healthcheck"]["test"] == ["CMD", program, "worker", "--check"]
    assert service["restart"] == "unless-stopped"
    assert int(service["stop_grace_period"].rstrip("s")) > 50  # NEKRO_WORKERS__DRAIN_SECONDS, CLEANUP_SECONDS
    assert service["depends_on"]["migrate"] == {"condition": "service_completed_successfully"}


def test_the_gateway_starts_on_request_because_it_needs_a_key() -> None:
    service = SERVICES["gateway"]
    assert service["profiles"] == ["api"]
    assert service["healthcheck"]["test"] == ["CMD", "nekro", "gateway", "--check"]
    assert int(service["stop_grace_period"].rstrip("s")) > GatewaySettings().drain_seconds
    assert service["ports"][0].endswith(f":{GatewaySettings().port}")


@pytest.mark.parametrize("name", sorted(SERVICES))
def test_images_are_pinned_and_replaceable(name: str) -> None:
    found = re.fullmatch(
        r"\$\{[A-Z_]+:-(?P<name>[\w./-]+):(?P<tag>[\w.-]+)(@sha256:[0-9a-f]{64})?\}", SERVICES[name]["image"]
    )
    assert found is not None and found["tag"] != "latest"
    is_ours = found["name"] == "nekro-workers"  # built from this directory
    assert found["tag"] == "local" if is_ours else re.search(r"\d", found["tag"])


def test_lane_rounds_requires_the_kernels_limits_and_has_what_they_need() -> None:
    service = SERVICES["rounds"]
    required = service["environment"]["NEKRO_SANDBOX__REQUIRE_KERNEL_LIMITS"]
    assert required == "${NEKRO_SANDBOX__REQUIRE_KERNEL_LIMITS:-true}"
    assert service["entrypoint"] == ["nekro-delegate"]
    assert service["cgroup"] == "private"
    assert "writable-cgroups=true" in service["security_opt"]
    # The only service with capabilities: nekro-delegate drops them.
    assert [name for name in OURS if "cap_add" in SERVICES[name] or "user" in SERVICES[name]] == ["rounds"]
    assert "sandboxes:/data/sandboxes" in service["volumes"]
    assert FILE["volumes"]["sandboxes"]["driver_opts"]["o"].partition(":-")[2].startswith("size=")


def test_the_delegating_entrypoint_drops_to_the_images_user_permanently() -> None:
    script = (ROOT / "deploy" / "nekro-delegate").read_text("utf-8")
    image = (ROOT / "Dockerfile").read_text("utf-8")
    assert "COPY deploy/nekro-delegate /usr/local/bin/nekro-delegate" in image
    assert os.access(ROOT / "deploy" / "nekro-delegate", os.X_OK)
    (user,) = re.findall(r"^USER (\d+):\1$", image, re.MULTILINE)
    for option in (f"--reuid={user}", f"--regid={user}", "--clear-groups", "--bounding-set=-all"):
        assert option in script
    assert "--inh-caps=-all" in script and "--no-new-privs" in script


def test_the_image_contains_every_package_and_the_build_context_every_copied_file() -> None:
    image = (ROOT / "Dockerfile").read_text("utf-8")
    of_bucket = (ROOT / "deploy" / "bucket" / "Dockerfile").read_text("utf-8")
    sent = re.findall(r"^!(\S+)$", (ROOT / ".dockerignore").read_text("utf-8"), re.MULTILINE)
    copied = {
        source
        for line in re.findall(r"^COPY (?!--from)(.+) \S+$", f"{image}\n{of_bucket}", re.MULTILINE)
        for source in line.split()
    }
    assert copied - {"deploy/bucket/requirements.txt"} == set(sent) - {"deploy/bucket"}
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["hatch"]["build"]
    assert set(packages["targets"]["wheel"]["packages"]) <= copied
    # Wheels are optional: a build with a package index has none.
    assert [name for name in copied if not (ROOT / name).exists()] in ([], ["deploy/wheels"])


@pytest.mark.root
def test_the_delegating_entrypoint_runs_without_any_capability() -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root, which it gives up")
    with tempfile.TemporaryDirectory() as name:  # pytest's directory is closed to other users
        os.chmod(name, 0o755)
        done = delegate(Path(name))
    user, group, *fields = done.stdout.split("\n")
    assert (user, group) == ("10001", "10001")
    assert {line.split()[1] for line in fields if line.startswith("Cap")} == {"0" * 16}
    assert "NoNewPrivs:\t1" in fields
    assert "cannot be given" in done.stderr


def delegate(tmp_path: Path) -> subprocess.CompletedProcess[str]:
    (tmp_path / "nekro").write_text("#!/bin/sh\nid -u; id -g; grep -E 'Cap|NoNewPrivs' /proc/self/status\n")
    (tmp_path / "nekro").chmod(0o755)
    script = (ROOT / "deploy" / "nekro-delegate").read_text("utf-8")
    # The host's own control groups must not be delegated.
    script = script.replace("group=/sys/fs/cgroup", f"group={tmp_path}/none")
    return subprocess.run(
        ["sh", "-c", script, "nekro-delegate", "worker"],
        env={"PATH": f"{tmp_path}:/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=True,
    )


def test_every_secret_is_a_required_file() -> None:
    for secret in FILE["secrets"].values():
        assert secret["file"].startswith("${WORKERS_SECRETS:?")
    assert set(re.findall(r"/run/secrets/(\w+)", TEXT)) == set(FILE["secrets"])


FILES: dict[str, Any] = yaml.safe_load((ROOT / "compose.files.yaml").read_text("utf-8"))


def test_with_an_s3_server_no_service_shares_a_volume_for_files() -> None:
    changed = {name: service for name, service in FILES["services"].items() if name != "bucket"}
    assert set(changed) == set(OURS)
    for service in changed.values():
        data, sandboxes = service["volumes"]
        assert data == "/data"  # without a name, so each container has its own
        assert (sandboxes["type"], sandboxes["target"]) == ("tmpfs", "/data/sandboxes")
        variables = service["environment"]
        assert variables["NEKRO_FILES__URL"] == "s3://nekro/files"
        assert set(variables) - {"NEKRO_FILES__URL"} == {
            "AWS_ACCESS_KEY_ID",
            "AWS_SECRET_ACCESS_KEY",
            "AWS_REGION",
            "AWS_ENDPOINT_URL",
        }
        assert ":?" in variables["AWS_SECRET_ACCESS_KEY"]
        assert service["depends_on"] == {"bucket": {"condition": "service_healthy"}}


def test_the_s3_server_is_unprivileged_and_not_published() -> None:
    server = FILES["services"]["bucket"]
    assert server["read_only"] and server["cap_drop"] == ["ALL"] and "ports" not in server
    assert server["networks"] == ["backend"]
    assert server["build"]["args"] == SERVICES["methods"]["build"]["args"]
    image = (ROOT / "deploy" / "bucket" / "Dockerfile").read_text("utf-8")
    base = (ROOT / "Dockerfile").read_text("utf-8")
    assert re.findall(r"^ARG BASE_IMAGE=.*$", image, re.MULTILINE) == re.findall(
        r"^ARG BASE_IMAGE=.*$", base, re.MULTILINE
    )
    assert "--require-hashes" in image and "USER 10001:10001" in image
    locked = (ROOT / "deploy" / "bucket" / "requirements.txt").read_text("utf-8").strip()
    assert locked in (ROOT / "constraints.txt").read_text("utf-8")


def test_every_named_setting_exists() -> None:
    known = {variable for variable, _, _ in known_variables()}
    named = {name for service in SERVICES.values() for name in service.get("environment", {})}
    ours = {name.removesuffix("_FILE") for name in named if name.startswith("NEKRO_")}
    assert ours <= known


def test_only_flower_and_the_gateway_are_published_and_only_on_loopback() -> None:
    published = {name: service["ports"] for name, service in SERVICES.items() if "ports" in service}
    assert sorted(published) == ["flower", "gateway"]
    assert all(port.startswith("127.0.0.1:") for ports in published.values() for port in ports)
    assert FILE["networks"]["backend"] == {"internal": True}


def test_the_seccomp_profile_denies_by_name_and_permits_namespaces() -> None:
    profile = json.loads((ROOT / "deploy" / "seccomp.json").read_text("utf-8"))
    denied = {name for rule in profile["syscalls"] for name in rule["names"]}
    assert {rule["action"] for rule in profile["syscalls"]} == {"SCMP_ACT_ERRNO"}
    assert {"bpf", "ptrace", "kexec_load", "init_module", "keyctl", "io_uring_setup"} <= denied
    assert not denied & {"clone", "clone3", "unshare", "mount", "pivot_root", "seccomp", "prctl"}


def test_generated_secrets_are_random_private_and_not_overwritten(tmp_path: Path) -> None:
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
