"""The chart of deploy/helm as Helm renders it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import yaml
from helm_process import HelmProcess

__all__ = [
    "CHART",
    "DEFAULTS",
    "SCALED",
    "VARIANTS",
    "Objects",
    "Render",
    "container_of",
    "migration",
    "names",
    "objects_of",
    "pods",
]

CHART = Path(__file__).parents[2] / "deploy" / "helm" / "nekro-workers"
DEFAULTS = yaml.safe_load((CHART / "values.yaml").read_text("utf-8"))
SCALED = {"autoscaling": {"enabled": True, "prometheus": {"serverAddress": "http://prometheus:9090"}}}
#: Values that change what exists; every check of all objects runs on each.
VARIANTS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "everything": {
        **SCALED,
        "image": {"repository": "registry.example.org/nekro", "tag": "1.2.3", "pullSecrets": ["registry"]},
        "extraEnv": [{"name": "HTTPS_PROXY", "value": "http://proxy:3128"}],
        "settings": {"NEKRO_PLUGINS__DIRS": "/opt/plugins"},
        "gateway": {"ingress": {"enabled": True, "host": "agent.example.org", "tlsSecret": "agent-tls"}},
        "workers": {
            "rounds": {
                "nodeSelector": {"nekro": "rounds"},
                "tolerations": [{"key": "nekro", "operator": "Exists", "effect": "NoSchedule"}],
                "affinity": {"podAntiAffinity": {}},
            }
        },
    },
    "a bucket": {"files": {"url": "s3://nekro/files", "secret": "bucket"}},
    "the least": {
        "gateway": {"enabled": False},
        "metrics": {"enabled": False},
        "flower": {"enabled": False},
        "storage": {"data": {"existingClaim": "files"}, "sandboxes": {"existingClaim": "shared"}},
        "sandbox": {"requireKernelLimits": False, "runtimeClass": ""},
        "workers": {"pinned": {"replicas": 0}},
    },
}

Objects = dict[str, dict[str, Any]]


class Render(Protocol):
    """Renders the chart with values; returns its objects by ``Kind/name``."""

    def __call__(
        self, values: dict[str, Any] | None = None, *, sets: str = "", name: str = "nekro"
    ) -> Objects: ...


def objects_of(helm: HelmProcess, values: dict[str, Any], **options: str) -> Objects:
    """The objects of the chart by ``Kind/name``."""
    documents = [
        item
        for file, text in helm.render(values, **options).items()
        if file.endswith(".yaml")
        for item in yaml.load_all(text, yaml.CSafeLoader)
        if item
    ]
    named = {f"{item['kind']}/{item['metadata']['name']}": item for item in documents}
    assert len(named) == len(documents), "two objects of one name"
    return named


def pods(objects: Objects) -> dict[str, dict[str, Any]]:
    return {
        name: item["spec"]["template"]["spec"]
        for name, item in objects.items()
        if item["kind"] in ("Deployment", "Job")
    }


def container_of(objects: Objects, component: str) -> dict[str, Any]:
    (container,) = objects[f"Deployment/nekro-{component}"]["spec"]["template"]["spec"]["containers"]
    return dict(container)


def names(objects: Objects, kind: str) -> set[str]:
    return {name.partition("/")[2] for name, item in objects.items() if item["kind"] == kind}


def migration(objects: Objects) -> str:
    (job,) = names(objects, "Job")
    return job
