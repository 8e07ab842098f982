"""The chart follows its values, and refuses wrong ones with a clear message.

``make helm`` installs Helm; without it, only the tests of the values' schema run.
"""

from __future__ import annotations

import json
import re
import shlex
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import yaml
from helm_process import HelmProcess, RefusedError
from rendered_chart import CHART, DEFAULTS, SCALED, VARIANTS, Render, container_of, migration, names, pods

from nekro.app.fleet_metrics import FLEET_METRICS
from nekro.cli.main import build_parser
from nekro_agent.methods import Lane

ROOT = Path(__file__).parents[2]


# --- values that people set


def test_the_image_is_the_same_everywhere_and_defaults_to_the_version(render: Render) -> None:
    version = yaml.safe_load((CHART / "Chart.yaml").read_text("utf-8"))["appVersion"]
    images = {spec["containers"][0]["image"] for spec in pods(render()).values()}
    assert images == {f"nekro-workers:{version}"}
    other = pods(render(VARIANTS["everything"]))
    assert {spec["containers"][0]["image"] for spec in other.values()} == {"registry.example.org/nekro:1.2.3"}
    assert all(spec["imagePullSecrets"] == [{"name": "registry"}] for spec in other.values())


def test_rounds_and_gateways_can_be_upgraded_after_the_others(render: Render) -> None:
    old = {"tag": "1"}
    objects = render({"image": {"tag": "2"}, "workers": {"rounds": old}, "gateway": old})
    images = {name: spec["containers"][0]["image"] for name, spec in pods(objects).items()}
    kept = {name for name, image in images.items() if image.endswith(":1")}
    assert kept == {"Deployment/nekro-rounds", "Deployment/nekro-gateway"}
    assert migration(objects).startswith("nekro-migrate-2-")


def test_an_upgrade_keeps_the_selectors(render: Render) -> None:
    """They cannot be changed: the API server refuses it."""
    before, after = render(), render({"image": {"tag": "next"}})
    for name, item in before.items():
        if item["kind"] == "Deployment":
            assert after[name]["spec"]["selector"] == item["spec"]["selector"]


def test_two_releases_of_one_namespace_share_no_pods(render: Render) -> None:
    one, two = render(name="one"), render({"sandbox": {"createRuntimeClass": False}}, name="two")
    assert set(one) & set(two) == set()
    selected = [
        tuple(sorted(item["spec"]["selector"]["matchLabels"].items()))
        for item in [*one.values(), *two.values()]
        if item["kind"] == "Deployment"
    ]
    assert len(set(selected)) == len(selected)


def test_replicas_are_those_of_the_values_unless_they_are_scaled(render: Render) -> None:
    objects = render({"workers": {"methods": {"replicas": 7}}})
    assert objects["Deployment/nekro-methods"]["spec"]["replicas"] == 7
    assert names(objects, "ScaledObject") == set()
    scaled = render(SCALED | {"workers": {"long": {"scale": None, "replicas": 3}}})
    assert names(scaled, "ScaledObject") == {"nekro-methods", "nekro-rounds", "nekro-gateway"}
    assert scaled["Deployment/nekro-long"]["spec"]["replicas"] == 3
    assert scaled["Deployment/nekro-pinned"]["spec"]["replicas"] == 2


def test_lanes_scale_by_the_age_of_waiting_work(render: Render) -> None:
    values: dict[str, Any] = deepcopy(SCALED) | {
        "workers": {"methods": {"scale": {"min": 3, "max": 9, "oldestSeconds": 0.5}}}
    }
    values["autoscaling"]["prometheus"]["matchers"] = 'namespace="agents"'
    objects = render(values)
    for lane in ("methods", "long", "rounds"):
        trigger, *further = objects[f"ScaledObject/nekro-{lane}"]["spec"]["triggers"]
        metric, lane_label = re.fullmatch(
            r'max\((\w+)\{lane="(\w+)",namespace="agents"\}\)', trigger["metadata"]["query"]
        ).groups()  # type: ignore[union-attr]
        assert (lane_label, FLEET_METRICS[metric][1]) == (lane, ("lane",))
        # Not per worker: work that waits is too old whatever their number.
        assert trigger["metricType"] == "Value"
        assert len(further) == (lane == "rounds")
    methods = objects["ScaledObject/nekro-methods"]["spec"]
    assert (methods["minReplicaCount"], methods["maxReplicaCount"]) == (3, 9)
    assert methods["triggers"][0]["metadata"]["threshold"] == "0.5"
    waiting = objects["ScaledObject/nekro-rounds"]["spec"]["triggers"][1]
    assert waiting["metadata"]["query"] == 'max(nekro_rounds_waiting{namespace="agents"})'
    assert "nekro_rounds_waiting" in FLEET_METRICS and waiting["metricType"] == "AverageValue"


def test_a_missing_metric_stops_no_worker(render: Render) -> None:
    """While the broker does not answer, its figures are missing; KEDA would count that as 0."""
    triggers = [
        trigger
        for item in render(SCALED).values()
        if item["kind"] == "ScaledObject"
        for trigger in item["spec"]["triggers"]
        if trigger["type"] == "prometheus"
    ]
    assert len(triggers) == 4
    assert {trigger["metadata"]["ignoreNullValues"] for trigger in triggers} == {"false"}


def test_secrets_are_named_by_the_values(render: Render) -> None:
    objects = render({"secrets": {"name": "vault", "model": "keys"}})
    for spec in pods(objects).values():
        (volume,) = [volume for volume in spec["volumes"] if volume["name"] == "secrets"]
        assert volume["secret"]["secretName"] == "vault"
    assert {"secretRef": {"name": "keys"}} in container_of(objects, "rounds")["envFrom"]
    assert "nekro-secrets" not in str(objects) and "nekro-model" not in str(objects)


def test_claims_have_the_class_and_size_of_the_values_and_stay_after_an_uninstall(render: Render) -> None:
    objects = render({"storage": {"data": {"storageClass": "cephfs", "size": "1Ti"}}})
    data, sandboxes = (objects[f"PersistentVolumeClaim/nekro-{name}"] for name in ("data", "sandboxes"))
    assert data["spec"]["storageClassName"] == "cephfs"
    assert data["spec"]["resources"]["requests"]["storage"] == "1Ti"
    assert "storageClassName" not in sandboxes["spec"]
    assert {item["metadata"]["annotations"]["helm.sh/resource-policy"] for item in (data, sandboxes)} == {
        "keep"
    }


def test_existing_claims_are_used_instead_of_new_ones(render: Render) -> None:
    objects = render({"storage": {"data": {"existingClaim": "files"}}})
    assert names(objects, "PersistentVolumeClaim") == {"nekro-sandboxes"}
    (volume,) = [one for one in pods(objects)["Deployment/nekro-long"]["volumes"] if one["name"] == "data"]
    assert volume["persistentVolumeClaim"] == {"claimName": "files"}


def test_with_a_bucket_no_volume_is_shared(render: Render) -> None:
    objects = render({"files": {"url": "s3://nekro/files", "secret": "bucket", "sandboxesSize": "2Gi"}})
    assert names(objects, "PersistentVolumeClaim") == set()
    assert "ReadWriteMany" not in str(objects)
    assert objects["ConfigMap/nekro-settings"]["data"]["NEKRO_FILES__URL"] == "s3://nekro/files"
    for spec in pods(objects).values():
        assert not any("persistentVolumeClaim" in volume for volume in spec["volumes"])
        assert {"secretRef": {"name": "bucket"}} in spec["containers"][0]["envFrom"]
    volumes = {volume["name"]: volume for volume in pods(objects)["Deployment/nekro-rounds"]["volumes"]}
    assert volumes["sandboxes"]["emptyDir"] == {"medium": "Memory", "sizeLimit": "2Gi"}
    assert volumes["data"]["emptyDir"] == {"sizeLimit": "20Gi"}


def test_without_a_bucket_files_are_on_claims(render: Render) -> None:
    objects = render()
    assert "NEKRO_FILES__URL" not in objects["ConfigMap/nekro-settings"]["data"]
    assert names(objects, "PersistentVolumeClaim") == {"nekro-data", "nekro-sandboxes"}


def test_extra_environment_reaches_all_pods_and_a_component_s_own_wins(render: Render) -> None:
    values = {
        "extraEnv": [{"name": "A", "value": "all"}],
        "workers": {"rounds": {"extraEnv": [{"name": "A", "value": "rounds"}]}},
    }
    objects = render(values)
    for name, spec in pods(objects).items():
        # Of two entries of one name, Kubernetes takes the last.
        environment = {one["name"]: one["value"] for one in spec["containers"][0]["env"]}
        assert environment["A"] == ("rounds" if name.endswith("rounds") else "all")
    assert {"name": "NEKRO_SANDBOX__REQUIRE_KERNEL_LIMITS", "value": "true"} in container_of(
        objects, "rounds"
    )["env"]


def test_settings_are_added_as_text_and_restart_the_pods(render: Render) -> None:
    # Helm's own text of the number is 1e+09; the second is `true` by default.
    values = {"NEKRO_SANDBOX__MAX_MEMORY_BYTES": 1_000_000_000, "NEKRO_LOG__JSON_LINES": False}
    objects = render({"settings": values})
    data = objects["ConfigMap/nekro-settings"]["data"]
    assert [data[name] for name in values] == ["1000000000", "false"]
    before = render()
    for name, item in objects.items():
        if item["kind"] == "Deployment":
            template, earlier = item["spec"]["template"], before[name]["spec"]["template"]
            assert template["metadata"]["annotations"] != earlier["metadata"]["annotations"]
            assert template["spec"] == earlier["spec"]


def test_resources_and_placement_are_those_of_the_component(render: Render) -> None:
    values = {
        "workers": {
            "rounds": {"nodeSelector": {"nekro": "rounds"}, "resources": {"limits": {"memory": "9Gi"}}}
        }
    }
    objects = render(values)
    assert container_of(objects, "rounds")["resources"] == {
        "requests": {"cpu": "500m", "memory": "512Mi"}, "limits": {"memory": "9Gi"}
    }  # fmt: skip
    placed = {name for name, spec in pods(objects).items() if spec.get("nodeSelector") == {"nekro": "rounds"}}
    assert placed == {"Deployment/nekro-rounds"}


def test_the_cluster_s_default_runtime_is_used_without_a_runtime_class(render: Render) -> None:
    objects = render({"sandbox": {"runtimeClass": "", "requireKernelLimits": False}})
    assert names(objects, "RuntimeClass") == set()
    assert "runtimeClassName" not in pods(objects)["Deployment/nekro-rounds"]
    assert container_of(objects, "rounds")["env"][0]["value"] == "false"


# --- values that are refused

REFUSED_BY_TEMPLATES = [
    (
        {"settings": {"NEKRO_DATABASE__URL": "x"}},
        "put it into the file database_url of the secret nekro-secrets",
    ),
    ({"settings": {"NEKRO_METRICS__PORT": 9000}}, "the mounts and probes of the chart need its own value"),
    ({"settings": {"NEKRO_FILES__URL": "s3://nekro/files"}}, "set files.url"),
    ({"files": {"url": "s3://key:secret@bucket"}}, "credentials are variables of the secret"),
    ({"files": {"secret": "bucket"}}, "files.secret needs files.url"),
    (
        {"files": {"url": "s3://nekro"}, "settings": {"NEKRO_PLUGINS__DIRS": "/opt/a,/data/plugins"}},
        "put plugins into the image",
    ),
    ({"gateway": {"ingress": {"enabled": True}}}, "gateway.ingress.enabled needs gateway.ingress.host"),
    ({"autoscaling": {"enabled": True}}, "autoscaling.enabled needs autoscaling.prometheus.serverAddress"),
    ({**SCALED, "metrics": {"enabled": False}}, "autoscaling.enabled needs metrics.enabled"),
    ({"workers": {"long": {"scale": {"min": 9}}}}, "scale of long: min 9 is more than max 5"),
]
#: The values, and what the message names.
REFUSED_BY_THE_SCHEMA: list[tuple[dict[str, Any], str, str]] = [
    ({"replicas": 3}, "", "replicas"),
    ({"workers": {"tools": {"replicas": 1}}}, "/workers", "tools"),
    ({"workers": {"methods": {"replicas": "two"}}}, "/workers/methods/replicas", "integer"),
    ({"workers": {"methods": {"replicas": -1}}}, "/workers/methods/replicas", "-1"),
    ({"workers": {"pinned": {"scale": {"min": 1, "max": 2}}}}, "/workers/pinned", "scale"),
    ({"workers": {"long": {"scale": {"oldestSeconds": 0}}}}, "/workers/long/scale/oldestSeconds", "0"),
    (
        {"workers": {"long": {"resources": {"limits": {"memory": None}}}}},
        "/workers/long/resources/limits",
        "memory",
    ),
    ({"image": {"tag": "a b"}}, "/image/tag", "a b"),
    ({"image": {"tag": 1.2}}, "/image/tag", "string"),
    ({"image": {"repository": ""}}, "/image/repository", ""),
    ({"image": {"pullPolicy": "Sometimes"}}, "/image/pullPolicy", "Never"),
    ({"secrets": {"name": ""}}, "/secrets/name", ""),
    ({"settings": {"HTTPS_PROXY": "x"}}, "", "HTTPS_PROXY"),
    ({"settings": {"NEKRO_LOG__LEVEL": {}}}, "/settings/NEKRO_LOG__LEVEL", "string"),
    ({"storage": {"data": {"size": "large"}}}, "/storage/data/size", "large"),
    ({"storage": {"data": {"accessModes": ["Any"]}}}, "/storage/data/accessModes/0", "ReadWriteMany"),
    ({"files": {"url": "nfs://server/files"}}, "/files/url", "nfs://server/files"),
    ({"files": {"size": "large"}}, "/files/size", "large"),
    ({"extraEnv": [{"value": "x"}]}, "/extraEnv/0", "name"),
    ({"gateway": {"ingress": {"host": "https://a.example"}}}, "/gateway/ingress/host", "https://a.example"),
    ({"gateway": {"service": {"port": 0}}}, "/gateway/service/port", "0"),
    (
        {"autoscaling": {"prometheus": {"serverAddress": "prometheus"}}},
        "/autoscaling/prometheus",
        "prometheus",
    ),
]


@pytest.mark.parametrize(("values", "message"), REFUSED_BY_TEMPLATES, ids=str)
def test_values_that_contradict_each_other_are_refused(
    render: Render, values: dict[str, Any], message: str
) -> None:
    with pytest.raises(RefusedError, match=re.escape(message)):
        render(values)


def test_a_long_name_of_a_release_is_refused(render: Render) -> None:
    with pytest.raises(RefusedError, match="at most 30 characters"):
        render(name="r" * 31)


@pytest.mark.parametrize(("values", "place", "word"), REFUSED_BY_THE_SCHEMA, ids=str)
def test_helm_names_the_value_that_the_schema_refuses(
    render: Render, values: dict[str, Any], place: str, word: str
) -> None:
    with pytest.raises(RefusedError) as refused:
        render(values)
    assert f"at '{place}" in str(refused.value) and word in str(refused.value)


# --- without Helm


def merged(values: dict[str, Any], further: dict[str, Any]) -> dict[str, Any]:
    """As Helm merges: null removes a default."""
    result = dict(values)
    for key, value in further.items():
        if value is None:
            result.pop(key, None)
        elif isinstance(value, dict):
            result[key] = merged(result.get(key, {}), value)
        else:
            result[key] = value
    return result


@pytest.fixture(scope="module")
def schema() -> Any:
    """The validator of the chart's values; importing jsonschema takes 2 s of the collection's 11."""
    from jsonschema import Draft7Validator

    found = json.loads((CHART / "values.schema.json").read_text("utf-8"))
    Draft7Validator.check_schema(found)
    return Draft7Validator(found)


def test_the_defaults_and_the_tested_values_fit_the_schema(schema: Any) -> None:
    for values in VARIANTS.values():
        schema.validate(merged(DEFAULTS, values))


@pytest.mark.parametrize(("values", "place", "word"), REFUSED_BY_THE_SCHEMA, ids=str)
def test_the_schema_refuses(schema: Any, values: dict[str, Any], place: str, word: str) -> None:
    (error,) = schema.iter_errors(merged(DEFAULTS, values))
    assert word in error.message


def test_each_lane_has_values() -> None:
    assert set(DEFAULTS["workers"]) == {lane.value for lane in Lane}


# --- the pages


def documented() -> list[list[str]]:
    """Commands of `helm` on the pages."""
    page = (ROOT / "docs" / "operations.md").read_text("utf-8").replace("\\\n", " ")
    return [shlex.split(line, comments=True) for line in re.findall(r"^helm .*", page, re.MULTILINE)]


def test_documented_commands_set_values_that_exist(render: Render) -> None:
    commands = documented()
    assert len(commands) >= 3
    for words in commands:
        assert words[1] in ("upgrade", "template") and str(CHART.relative_to(ROOT)) in words
        sets = [words[n + 1] for n, word in enumerate(words) if word == "--set"]
        assert render(sets=",".join(sets))


def test_the_notes_name_existing_commands_and_objects(helm: HelmProcess, render: Render) -> None:
    notes = helm.render({}, name="site")["NOTES.txt"]
    objects = render(name="site")
    commands = re.findall(r"exec deploy/(\S+) -- nekro (.*)", notes)
    assert len(commands) == 2
    for deployment, arguments in commands:
        assert f"Deployment/{deployment}" in objects
        build_parser().parse_args(shlex.split(arguments))
    (service,) = re.findall(r"port-forward (service/\S+)", notes)
    assert f"Service/{service.partition('/')[2]}" in objects
