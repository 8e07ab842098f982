"""The manifests fit the Kubernetes schema and follow its security practices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from broker_config.settings import GatewaySettings, WorkerSettings, known_variables
from cli.main import build_parser
from nekro_agent.methods import Lane

FOLDER = Path(__file__).parents[2] / "deploy" / "kubernetes"
OBJECTS = [item for path in sorted(FOLDER.glob("*.yaml")) for item in yaml.safe_load_all(path.read_text())]


def named(item: dict[str, Any]) -> str:
    return f"{item['kind']}-{item['metadata']['name']}"


def pods() -> list[dict[str, Any]]:
    return [item for item in OBJECTS if item["kind"] in ("Deployment", "Job")]


@pytest.mark.parametrize("item", OBJECTS, ids=named)
def test_the_manifests_fit_the_kubernetes_schema(item: dict[str, Any]) -> None:
    import kubernetes_validate  # its import takes longer than all other imports of the collection

    kubernetes_validate.validate(item, kubernetes_validate.latest_version(), strict=True)


@pytest.mark.parametrize("item", pods(), ids=named)
def test_pods_are_unprivileged_and_run_an_existing_command(item: dict[str, Any]) -> None:
    spec = item["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    if container.get("command") == ["nekro-delegate"]:
        # Root of a user namespace, and only until it has become user 10001.
        assert spec["hostUsers"] is False
        assert set(container["securityContext"]["capabilities"].pop("add")) == {
            "CHOWN", "KILL", "SETGID", "SETPCAP", "SETUID"
        }  # fmt: skip
    else:
        assert spec["securityContext"]["runAsNonRoot"] and spec["securityContext"]["runAsUser"] == 10001
    assert spec["automountServiceAccountToken"] is False
    security = container["securityContext"]
    assert security["readOnlyRootFilesystem"] and security["capabilities"] == {"drop": ["ALL"]}
    assert security["allowPrivilegeEscalation"] is False
    assert container["resources"]["limits"]["memory"] and ":" in container["image"]
    build_parser().parse_args(container["args"])
    mounted = {volume["name"] for volume in container["volumeMounts"]}
    assert mounted <= {volume["name"] for volume in spec["volumes"]}


@pytest.mark.parametrize("lane", list(Lane))
def test_each_lane_has_probes_and_a_grace_period_longer_than_its_drain(lane: Lane) -> None:
    (item,) = [item for item in pods() if item["metadata"]["name"] == f"nekro-{lane}"]
    spec = item["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    assert container["args"] == ["worker", "--lane", lane.value]
    assert container["readinessProbe"]["httpGet"]["path"] == "/readyz"
    assert container["livenessProbe"]["httpGet"]["path"] == "/livez"
    assert spec["terminationGracePeriodSeconds"] > WorkerSettings().stop_seconds
    assert item["spec"]["strategy"]["rollingUpdate"]["maxUnavailable"] == 0


def test_lane_rounds_requires_the_kernels_limits_and_has_what_they_need() -> None:
    (item,) = [item for item in pods() if item["metadata"]["name"] == "nekro-rounds"]
    spec = item["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    assert {"name": "NEKRO_SANDBOX__REQUIRE_KERNEL_LIMITS", "value": "true"} in container["env"]
    assert container["command"] == ["nekro-delegate"]
    assert spec["runtimeClassName"] in {named(item).partition("-")[2] for item in OBJECTS}
    for lane in Lane:
        (pod,) = [item for item in pods() if item["metadata"]["name"] == f"nekro-{lane}"]
        (each,) = pod["spec"]["template"]["spec"]["containers"]
        assert {"name": "sandboxes", "mountPath": "/data/sandboxes"} in each["volumeMounts"]


def test_the_gateway_has_probes_a_service_and_time_to_drain() -> None:
    (item,) = [item for item in pods() if item["metadata"]["name"] == "nekro-gateway"]
    spec = item["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    port = GatewaySettings().port
    assert container["ports"] == [{"name": "http", "containerPort": port}]
    paths = {name: container[name]["httpGet"]["path"] for name in ("readinessProbe", "livenessProbe")}
    assert paths == {"readinessProbe": "/readyz", "livenessProbe": "/healthz"}
    assert spec["terminationGracePeriodSeconds"] > GatewaySettings().drain_seconds
    (service,) = [item for item in OBJECTS if named(item) == "Service-nekro-gateway"]
    assert service["spec"]["selector"] == item["spec"]["selector"]["matchLabels"]
    (ingress,) = [item for item in OBJECTS if item["kind"] == "Ingress"]
    (path,) = ingress["spec"]["rules"][0]["http"]["paths"]
    assert path["backend"]["service"]["name"] == service["metadata"]["name"]
    assert ingress["metadata"]["annotations"]["nginx.ingress.kubernetes.io/proxy-buffering"] == "off"


def test_every_named_setting_exists() -> None:
    (item,) = [item for item in OBJECTS if item["kind"] == "ConfigMap"]
    known = {variable for variable, _, _ in known_variables()}
    assert {name.removesuffix("_FILE") for name in item["data"]} <= known


def test_the_manifests_contain_no_secret() -> None:
    assert all(item["kind"] != "Secret" for item in OBJECTS)
