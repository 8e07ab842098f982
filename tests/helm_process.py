"""Helm in a process of its own: its library is a Go program, which must not share a process that forks.

``make helm`` installs the library into ``.helm``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any

__all__ = ["INSTALLED", "HelmProcess", "RefusedError"]

INSTALLED = Path(__file__).resolve().parents[1] / ".helm"


class RefusedError(Exception):
    """Helm refused the values or the chart; has its message."""


class HelmProcess:
    """Renders and checks the chart in a folder, as `helm template` and `helm lint --strict` do."""

    def __init__(self, chart: Path) -> None:
        self._chart = chart

    def __enter__(self) -> HelmProcess:
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(self._chart)],
            env=os.environ | {"PYTHONPATH": str(INSTALLED)},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._process:
            pass  # waits for the process, which ends with its input

    def _ask(self, **question: Any) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline())
        if "refused" in answer:
            raise RefusedError(answer["refused"])
        return answer["value"]

    def lint(self, values: dict[str, Any]) -> list[str]:
        """Findings that are worse than advice."""
        return list(self._ask(lint=values))

    def render(self, values: dict[str, Any], *, sets: str = "", name: str = "nekro") -> dict[str, str]:
        """The text of each template by its file name; ``sets`` is the argument of `--set`."""
        return dict(self._ask(render=values, sets=sets, name=name))


def _merge(values: dict[str, Any], further: dict[str, Any]) -> dict[str, Any]:
    merged = dict(values)
    for key, value in further.items():
        known = merged.get(key)
        merged[key] = _merge(known, value) if isinstance(known, dict) and isinstance(value, dict) else value
    return merged


def _answer(helm: Any, path: str, question: dict[str, Any]) -> Any:
    if "lint" in question:
        found = helm.lint(path, question["lint"], strict=True)
        return [one["error"] for one in found["messages"] if one["severity"] > 1] + found["errors"]
    with helm.Chart.load(path) as chart:
        sets = helm.parse_set_string(question["sets"]) if question["sets"] else {}
        values = _merge(question["render"], sets)
        texts = chart.render(values, name=question["name"], namespace="agents")
    return {name.rpartition("/")[2]: text for name, text in texts.items()}


def _serve(path: str) -> None:
    import helm_python as helm

    for line in sys.stdin:
        try:
            answer = {"value": _answer(helm, path, json.loads(line))}
        except helm.HelmError as exc:
            answer = {"refused": str(exc)}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    _serve(sys.argv[1])
