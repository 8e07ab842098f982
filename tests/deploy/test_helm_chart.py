"""The chart, rendered by Helm, fits the schemas of Kubernetes and KEDA and follows security practices.

``make helm`` installs Helm.
"""

from __future__ import annotations

import json
import re
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from helm_process import HelmProcess
from rendered_chart import VARIANTS, Objects, Render, container_of, migration, names, pods

from broker_config.settings import GatewaySettings, WorkerSettings, known_variables
from nekro.cli.main import build_parser
from nekro_agent.methods import Lane


@pytest.fixture(scope="module", params=VARIANTS)
def variant(request: pytest.FixtureRequest, render: Render) -> Objects:
    return render(VARIANTS[request.param])


# --- every object


def test_helm_finds_nothing_to_correct(helm: HelmProcess) -> None:
    assert [finding for values in VARIANTS.values() for finding in helm.lint(values)] == []


def test_objects_fit_the_schemas_of_kubernetes_and_keda(variant: Objects) -> None:
    # Their imports take longer than all other imports of the collection.
    import kubernetes_validate
    from jsonschema import Draft7Validator

    keda = Draft7Validator(
        json.loads((Path(__file__).parent / "scaledobject.schema.json").read_text("utf-8"))
    )
    for item in variant.values():
        if item["kind"] == "ScaledObject":
            keda.validate(item)
        else:
            kubernetes_validate.validate(item, kubernetes_validate.latest_version(), strict=True)


def test_pods_are_unprivileged_and_run_an_existing_command(variant: Objects) -> None:
    for name, spec in pods(variant).items():
        (container,) = spec["containers"]
        security = deepcopy(container["securityContext"])
        if container.get("command") == ["nekro-delegate"]:
            # Root of a user namespace, and only until it has become user 10001.
            assert spec["hostUsers"] is False
            assert set(security["capabilities"].pop("add")) == {
                "CHOWN",
                "KILL",
                "SETGID",
                "SETPCAP",
                "SETUID",
            }
        else:
            assert spec["securityContext"]["runAsNonRoot"] and spec["securityContext"]["runAsUser"] == 10001
        assert spec["automountServiceAccountToken"] is False, name
        assert security["readOnlyRootFilesystem"] and security["capabilities"] == {"drop": ["ALL"]}
        assert security["allowPrivilegeEscalation"] is False
        assert container["resources"]["limits"]["memory"] and ":" in container["image"]
        build_parser().parse_args(container["args"])


def test_objects_refer_to_each_other_by_names_that_exist(variant: Objects) -> None:
    claims = names(variant, "PersistentVolumeClaim") | {"files", "shared"}
    for name, item in variant.items():
        spec = item.get("spec", {})
        assert item["kind"] == "RuntimeClass" or item["metadata"]["namespace"] == "agents"
        if item["kind"] in ("Deployment", "PodDisruptionBudget"):
            labels = variant[f"Deployment/{item['metadata']['name']}"]["spec"]["template"]["metadata"][
                "labels"
            ]
            assert spec["selector"]["matchLabels"].items() <= labels.items(), name
        if item["kind"] == "ScaledObject":
            target = variant[f"Deployment/{spec['scaleTargetRef']['name']}"]
            assert "replicas" not in target["spec"], "an upgrade would undo the scaling"
        if item["kind"] == "Ingress":
            (path,) = spec["rules"][0]["http"]["paths"]
            assert path["backend"]["service"]["name"] in names(variant, "Service")
    for name, spec in pods(variant).items():
        (container,) = spec["containers"]
        volumes = {volume["name"]: volume for volume in spec["volumes"]}
        assert {mount["name"] for mount in container["volumeMounts"]} == volumes.keys(), name
        for volume in volumes.values():
            if "persistentVolumeClaim" in volume:
                assert volume["persistentVolumeClaim"]["claimName"] in claims
        for source in container["envFrom"]:
            if "configMapRef" in source:
                assert source["configMapRef"]["name"] in names(variant, "ConfigMap")


def test_the_chart_makes_no_secret_and_each_setting_exists(variant: Objects) -> None:
    assert names(variant, "Secret") == set()
    known = {variable for variable, _, _ in known_variables()}
    data = variant["ConfigMap/nekro-settings"]["data"]
    assert {name.removesuffix("_FILE") for name in data} <= known
    assert data["NEKRO_METRICS__PORT"] == str(container_of(variant, "methods")["ports"][0]["containerPort"])


# --- components


@pytest.mark.parametrize("lane", list(Lane))
def test_each_lane_has_probes_and_a_grace_period_longer_than_its_drain(render: Render, lane: Lane) -> None:
    item = render()[f"Deployment/nekro-{lane}"]
    spec = item["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    assert container["args"] == ["worker", "--lane", lane.value]
    assert container["readinessProbe"]["httpGet"]["path"] == "/readyz"
    assert container["livenessProbe"]["httpGet"]["path"] == "/livez"
    assert spec["terminationGracePeriodSeconds"] > WorkerSettings().stop_seconds
    assert item["spec"]["strategy"]["rollingUpdate"]["maxUnavailable"] == 0
    assert {"name": "sandboxes", "mountPath": "/data/sandboxes"} in container["volumeMounts"]


def test_lane_rounds_requires_the_kernels_limits_and_has_what_they_need(render: Render) -> None:
    objects = render()
    spec = pods(objects)["Deployment/nekro-rounds"]
    container = container_of(objects, "rounds")
    assert container["env"] == [{"name": "NEKRO_SANDBOX__REQUIRE_KERNEL_LIMITS", "value": "true"}]
    assert container["command"] == ["nekro-delegate"]
    assert spec["runtimeClassName"] in names(objects, "RuntimeClass")
    assert container["securityContext"]["procMount"] == "Unmasked"
    assert {"secretRef": {"name": "nekro-model"}} in container["envFrom"]


def test_the_gateway_has_probes_a_service_and_time_to_drain(render: Render) -> None:
    objects = render(VARIANTS["everything"])
    item = objects["Deployment/nekro-gateway"]
    spec = item["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    assert container["ports"] == [{"name": "http", "containerPort": GatewaySettings().port}]
    paths = {name: container[name]["httpGet"]["path"] for name in ("readinessProbe", "livenessProbe")}
    assert paths == {"readinessProbe": "/readyz", "livenessProbe": "/healthz"}
    assert spec["terminationGracePeriodSeconds"] > GatewaySettings().drain_seconds
    service = objects["Service/nekro-gateway"]
    assert service["spec"]["selector"] == item["spec"]["selector"]["matchLabels"]
    ingress = objects["Ingress/nekro-gateway"]
    assert ingress["spec"]["rules"][0]["host"] == "agent.example.org"
    assert ingress["spec"]["tls"] == [{"hosts": ["agent.example.org"], "secretName": "agent-tls"}]
    assert ingress["metadata"]["annotations"]["nginx.ingress.kubernetes.io/proxy-buffering"] == "off"


# --- the migration


def test_a_migration_is_named_after_release_and_version(render: Render) -> None:
    assert re.fullmatch(
        r"site-migrate-1-4-0-[0-9a-f]{8}", migration(render({"image": {"tag": "1.4.0"}}, name="site"))
    )


@pytest.mark.parametrize(
    "change",
    [
        {"image": {"tag": "next"}},
        {"image": {"repository": "registry.example.org/nekro"}},
        {"extraEnv": [{"name": "A", "value": "b"}]},
        {"migration": {"resources": {"limits": {"memory": "1Gi"}}}},
        {"secrets": {"name": "others"}},
    ],
    ids=str,
)
def test_an_upgrade_that_changes_its_pod_makes_a_new_migration(
    render: Render, change: dict[str, Any]
) -> None:
    """A Job's pod cannot be changed: the API server refuses it."""
    assert migration(render(change)) != migration(render())


def test_an_upgrade_that_changes_other_things_leaves_the_migration(render: Render) -> None:
    others = {"workers": {"methods": {"replicas": 5}}, "settings": {"NEKRO_LOG__LEVEL": "DEBUG"}}
    before, after = render(), render(others)
    assert migration(after) == migration(before)
    assert after[f"Job/{migration(after)}"] == before[f"Job/{migration(before)}"]


@pytest.mark.parametrize(
    "tag", ["a" * 128, "V1.0_RC.1", "sha-0123456789abcdef", "1.0.0-rc.1", "abcdefghijklm.9", "_x_"]
)
def test_a_migration_has_a_valid_name_for_every_tag(render: Render, tag: str) -> None:
    release = "r" * 30
    name = migration(render({"image": {"tag": tag}}, name=release))
    # Of a Job's pods, whose label has the same limit.
    assert re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", name), name
