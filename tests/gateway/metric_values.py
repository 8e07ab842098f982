"""Reads the metrics of a gateway, or a text in their format."""

from __future__ import annotations

import httpx
from prometheus_client.parser import text_string_to_metric_families

__all__ = ["Figures", "figures_of", "parsed"]

#: Sample names with their label values in the order of the labels' names, and their values.
Figures = dict[tuple[str, ...], float]


def parsed(text: str) -> Figures:
    """Return the samples of a text."""
    return {
        (sample.name, *(sample.labels[name] for name in sorted(sample.labels))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


async def figures_of(http: httpx.AsyncClient) -> Figures:
    """Return the samples of a gateway; all gateways of a test's process share them."""
    answer = await http.get(http.base_url.join("/metrics"))
    assert answer.status_code == 200, answer.text
    return parsed(answer.text)
