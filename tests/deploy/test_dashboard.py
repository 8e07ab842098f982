"""The dashboard and the alarms refer to existing metrics."""

from __future__ import annotations

import json
import re
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from nekro.app.fleet_metrics import FLEET_METRICS
from nekro.base.metrics import Metrics

ROOT = Path(__file__).parents[2]
GRAFANA = ROOT / "deploy" / "grafana"
ALARMS = ROOT / "deploy" / "prometheus" / "alarms.yml"
_NAME = re.compile(r"\b(?:nekro|process|gen_ai_(?:client|invoke_agent|execute_tool))_[a-z_]+\b")
_OURS = ("nekro", "gen_ai")
_LABELS = re.compile(r"\{\{\s*(?:\$labels\.)?(\w+)\s*\}\}")


@pytest.fixture(scope="module")
def known() -> dict[str, set[str]]:
    """Sample names that Prometheus would know, with their labels."""
    names = {name: set(labels) for name, (_, labels) in FLEET_METRICS.items()}
    figures = Metrics()
    for figure in vars(figures).values():
        labels = set(getattr(figure, "_labelnames", ()))
        for metric in figure.describe() if hasattr(figure, "describe") else ():
            suffixes = {"counter": ["_total"], "histogram": ["_bucket", "_count", "_sum"]}
            for suffix in suffixes.get(metric.type, [""]):
                names[f"{metric.name}{suffix}"] = labels
    for metric in figures.registry.collect():
        for sample in metric.samples:
            names.setdefault(sample.name, set())
    return names


def queries() -> Iterator[tuple[str, str]]:
    for file in sorted(GRAFANA.glob("*.json")):
        for panel in json.loads(file.read_text("utf-8"))["panels"]:
            for target in panel.get("targets", ()):
                yield target["expr"], target["legendFormat"]


def alarms() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load(ALARMS.read_text("utf-8"))["groups"]
    return list(group["rules"])


def test_the_dashboards_equal_their_generated_form() -> None:
    made = runpy.run_path(str(ROOT / "scripts" / "make-dashboard"))["DASHBOARDS"]
    read = {file.name: json.loads(file.read_text("utf-8")) for file in GRAFANA.glob("*.json")}
    assert read == made, "run scripts/make-dashboard"


def test_the_labels_of_queries_are_those_of_the_metrics(known: dict[str, set[str]]) -> None:
    for query, _ in queries():
        labels = set().union(*(known[name] for name in _NAME.findall(query))) | {"le", "job"}
        for group in re.findall(r"sum by \(([^)]*)\)", query):
            assert {name.strip() for name in group.split(",")} <= labels, query
        assert set(re.findall(r"[{,](\w+)(?:=~?|!=)\"", query)) <= labels, query


@pytest.mark.parametrize(("query", "legend"), list(queries()))
def test_each_panel_uses_existing_metrics_and_labels(
    query: str, legend: str, known: dict[str, set[str]]
) -> None:
    names = _NAME.findall(query)
    assert names and set(names) <= set(known), query
    labels = set().union(*(known[name] for name in names)) | {"instance"}
    assert set(_LABELS.findall(legend)) <= labels


@pytest.mark.parametrize("alarm", alarms(), ids=lambda alarm: str(alarm["alert"]))
def test_each_alarm_uses_existing_metrics_and_is_explained(
    alarm: dict[str, Any], known: dict[str, set[str]]
) -> None:
    names = _NAME.findall(alarm["expr"])
    assert names and set(names) <= set(known)
    assert f"`{alarm['alert']}`" in (ROOT / "docs" / "operations.md").read_text("utf-8")


def test_every_metric_is_on_the_dashboard(known: dict[str, set[str]]) -> None:
    shown = {name for query, _ in queries() for name in _NAME.findall(query)}
    families = {
        re.sub(r"_(bucket|count|sum)$", "", name)
        for name in known
        # When a counter or histogram began, which Prometheus does not keep.
        if name.startswith(_OURS) and not name.endswith("_created")
    }
    assert families == {re.sub(r"_(bucket|count|sum)$", "", name) for name in shown if name.startswith(_OURS)}
