"""Installed packages are pinned by hash and base images by digest."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

pytestmark = pytest.mark.extended

ROOT = Path(__file__).parents[2]
LOCKS = ("constraints.txt", "deploy/requirements.txt", "requirements.txt")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
DIGEST = re.compile(r"[\w./-]+(:[\w.-]+)?@sha256:[0-9a-f]{64}")


def locked(name: str) -> dict[str, tuple[str, frozenset[str]]]:
    """Version and hashes of each package of a lock file."""
    text = (ROOT / name).read_text("utf-8").replace("\\\n", " ")
    found = {}
    for line in filter(None, map(str.strip, text.split("\n"))):
        if line.startswith("#"):
            continue
        pinned, *hashes = line.split("--hash=")
        requirement = Requirement(pinned)
        (version,) = requirement.specifier
        assert version.operator == "==", line
        assert hashes and all(re.fullmatch(r"sha256:[0-9a-f]{64}", one.strip()) for one in hashes), pinned
        found[canonicalize_name(requirement.name)] = (version.version, frozenset(map(str.strip, hashes)))
    return found


@pytest.mark.parametrize("name", LOCKS)
def test_lock_files_contain_packages_and_hashes_and_no_index(name: str) -> None:
    assert len(locked(name)) > 50
    text = (ROOT / name).read_text("utf-8")
    assert "://" not in text and "--index" not in text and "--find-links" not in text and " @ " not in text


def test_locks_cover_the_project_s_requirements_and_agree() -> None:
    everything, image, base = (locked(name) for name in LOCKS)
    extras = PROJECT["optional-dependencies"]
    wanted = {
        LOCKS[0]: [
            one
            for extra in ("test", "flower", "otel", "plugins", "bench", "release")
            for one in extras[extra]
        ],
        LOCKS[1]: [one for extra in ("flower", "otel", "plugins") for one in extras[extra]],
        LOCKS[2]: ["editables", "uv"],
    }
    for name, further in wanted.items():
        found = locked(name)
        for text in [*PROJECT["dependencies"], *further, "hatchling"]:
            requirement = Requirement(text)
            version, _ = found[canonicalize_name(requirement.name)]
            assert version in requirement.specifier, f"{name}: {text}; run `make constraints`"
    assert image.items() <= everything.items(), "run `make constraints`"
    assert base.items() <= everything.items(), "run `make constraints`"
    assert not {"pytest", "mypy", "uv"} & set(image)


def pip_installs(name: str) -> list[str]:
    """Every `pip install` command of a file."""
    text = (ROOT / name).read_text("utf-8").replace("\\\n", " ")
    return [line for line in text.split("\n") if re.search(r"(pip|\$\(PIP\))[\w -]* install", line)]


@pytest.mark.parametrize(("name", "count"), [("Makefile", 0), ("Dockerfile", 2)])
def test_pip_installs_only_hashed_packages_or_the_project_itself(name: str, count: int) -> None:
    """``test_install_locked.py`` shows what the script of the Makefile does."""
    found = pip_installs(name)
    assert len(found) == count, found
    for command in found:
        is_hashed = "--require-hashes -r" in command
        is_project = "--no-index --no-deps --no-build-isolation" in command and command.rstrip().endswith(".")
        assert is_hashed != is_project, command


def base_images() -> dict[str, str]:
    """Every image of release files that is not built here, by its place."""
    found = {}
    for line in (ROOT / "Dockerfile").read_text("utf-8").split("\n"):
        match = re.match(r"(?:ARG BASE_IMAGE=|FROM )(\S+)", line)
        if match and match[1] != "${BASE_IMAGE}":
            found[f"Dockerfile: {line}"] = match[1]
    compose = (ROOT / "compose.yaml").read_text("utf-8")
    for variable, image in re.findall(r"\$\{(\w+_IMAGE):-([^}]+)\}", compose):
        found[f"compose.yaml: {variable}"] = image
    # The chart has one image; test_helm_chart.py finds it in all pods.
    values = yaml.safe_load((ROOT / "deploy/helm/nekro-workers/values.yaml").read_text("utf-8"))
    found["values.yaml"] = f"{values['image']['repository']}:{values['image']['tag']}"
    return {where: image for where, image in found.items() if not image.startswith("nekro-workers:")}


def test_external_images_are_pinned_by_digest() -> None:
    found = base_images()
    assert {where.partition(":")[0] for where in found} >= {"Dockerfile", "compose.yaml"}
    assert {where for where, image in found.items() if not DIGEST.fullmatch(image)} == set()


def test_the_base_image_of_the_build_is_the_same_in_both_files() -> None:
    (base,) = [image for where, image in base_images().items() if where.startswith("Dockerfile")]
    compose = yaml.safe_load((ROOT / "compose.yaml").read_text("utf-8"))
    assert base in compose["x-nekro"]["build"]["args"]["BASE_IMAGE"]


def test_a_bill_of_materials_lists_every_package_of_the_image(tmp_path: Path) -> None:
    target = tmp_path / "bill.json"
    tool = Path(sys.executable).with_name("cyclonedx-py")
    subprocess.run(
        [tool, "requirements", "--pyproject", ROOT / "pyproject.toml", "--of", "JSON", "-o", target,
         ROOT / "deploy/requirements.txt"], check=True, capture_output=True,
    )  # fmt: skip
    bill = json.loads(target.read_text("utf-8"))
    assert (bill["bomFormat"], bill["metadata"]["component"]["name"]) == ("CycloneDX", "nekro-workers")
    components = {canonicalize_name(one["name"]): one["version"] for one in bill["components"]}
    assert components == {name: version for name, (version, _) in locked(LOCKS[1]).items()}


def test_the_security_policy_names_a_contact_and_its_scope() -> None:
    text = (ROOT / "SECURITY.md").read_text("utf-8")
    for part in ("## Reporting", "## Supported versions", "## Scope", "docs/security.md"):
        assert part in text
