"""A release: its version stands in one place, and its wheel holds the product and nothing else."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path
from zipfile import ZipFile

import pytest
import yaml

ROOT = Path(__file__).parents[2]
CHART = ROOT / "deploy" / "helm" / "nekro-workers"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
WHEEL = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]
#: Folders of the source tree, and where the wheel has them.
SHIPPED = {package: package for package in WHEEL["packages"]} | WHEEL["force-include"]


def product_files() -> dict[str, str]:
    """Where the wheel has each file of the source tree that it ships."""
    return {
        path.relative_to(ROOT).as_posix(): f"{inside}/{path.relative_to(ROOT / folder).as_posix()}"
        for folder, inside in SHIPPED.items()
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def test_the_version_stands_in_one_place_and_in_the_chart() -> None:
    stated = PROJECT["project"]["version"]
    readers = [ROOT / name for name in ("Makefile", "Dockerfile", "compose.yaml", *product_files())]
    readers += [*ROOT.glob("README*.md"), CHART / "values.yaml", *(CHART / "templates").iterdir()]
    again = re.compile(rf"\bnekro[-_]workers\S*\d+\.\d+\.\d+|(?<![\d.]){re.escape(stated)}(?![\d.])")
    assert [str(path) for path in readers if again.search(path.read_text("utf-8"))] == []
    # Helm reads no other file.
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text("utf-8"))
    assert (chart["version"], chart["appVersion"]) == (stated, stated)


def test_the_command_reports_the_installed_version() -> None:
    command = [sys.executable, "-m", "nekro.cli.main", "--version"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == f"nekro-workers {version('nekro-workers')}\n"


@pytest.mark.extended
def test_the_wheel_holds_the_product_and_nothing_else(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, capture_output=True, check=True)
    (wheel,) = tmp_path.iterdir()
    with ZipFile(wheel) as archive:
        inside = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert inside == set(product_files().values())
