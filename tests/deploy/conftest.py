"""Helm for the tests of the chart."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from helm_process import INSTALLED, HelmProcess
from rendered_chart import CHART, Objects, Render, objects_of


@pytest.fixture(scope="module")
def helm() -> Iterator[HelmProcess]:
    if not (INSTALLED / ".installed").exists():
        pytest.skip("Helm is not installed; run make helm")
    with HelmProcess(CHART) as process:
        yield process


@pytest.fixture(scope="module")
def render(helm: HelmProcess) -> Render:
    def objects(values: dict[str, Any] | None = None, **options: str) -> Objects:
        return objects_of(helm, values or {}, **options)

    return objects
