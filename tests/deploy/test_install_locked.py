"""``scripts/install-locked`` installs a lock file by uv or by pip, with pip's configuration and by hash."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Callable, Iterator
from pathlib import Path
from zipfile import ZipFile

import pytest

pytestmark = pytest.mark.extended

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "install-locked"
UV = Path(sys.executable).with_name("uv")
WHEEL = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
#: A build backend that needs nothing: the project is not what is tested here.
BACKEND = """
from pathlib import Path
from zipfile import ZipFile

FILES = {
    "METADATA": "Metadata-Version: 2.1\\nName: project\\nVersion: 1\\n",
    "WHEEL": "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n",
    "RECORD": "",
}

def build_editable(directory, config_settings=None, metadata_directory=None):
    name = "project-1-py3-none-any.whl"
    with ZipFile(Path(directory) / name, "w") as wheel:
        for file, text in FILES.items():
            wheel.writestr(f"project-1.dist-info/{file}", text)
    return name
"""
PROJECT = """
[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]

[project]
name = "project"
version = "1"
"""


class Environment:
    """An environment without packages, beside a folder of wheels and a project."""

    def __init__(self, folder: Path) -> None:
        self.wheels = folder / "wheels"
        self.project = folder / "project"
        self.project.mkdir(parents=True)
        (self.project / "pyproject.toml").write_text(PROJECT, "utf-8")
        (self.project / "backend.py").write_text(BACKEND, "utf-8")
        self.wheels.mkdir()
        venv.create(folder / "venv", with_pip=True)
        self.bin = folder / "venv" / "bin"
        self.site = Path(sysconfig.get_path("purelib", "venv", {"base": str(folder / "venv")}))
        self.uv = self.bin / "uv"
        self.uv.symlink_to(UV)
        self.configuration = folder / "pip.conf"
        kept = {name: v for name, v in os.environ.items() if not name.startswith(("PIP_", "UV_"))}
        self.variables = kept | {
            "PIP_CONFIG_FILE": str(self.configuration),
            "UV_CACHE_DIR": str(folder / "cache"),
        }

    def wheel(self, name: str) -> str:
        """Write a wheel of a package; return its line of a lock file."""
        path = self.wheels / f"{name}-1-py3-none-any.whl"
        with ZipFile(path, "w") as file:
            file.writestr(f"{name}.py", "")
            file.writestr(
                f"{name}-1.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n"
            )
            file.writestr(f"{name}-1.dist-info/WHEEL", WHEEL)
            file.writestr(f"{name}-1.dist-info/RECORD", f"{name}.py,,\n{name}-1.dist-info/RECORD,,\n")
        return f"{name}==1 --hash=sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}\n"

    def install(self, lock: str, configuration: str) -> subprocess.CompletedProcess[str]:
        """Run the script on a lock file, with a configuration of pip."""
        self.configuration.write_text(f"[global]\n{configuration}", "utf-8")
        (self.project / "lock.txt").write_text(lock, "utf-8")
        return subprocess.run(
            [self.bin / "python", SCRIPT, "lock.txt"],
            cwd=self.project, env=self.variables, capture_output=True, text=True, check=False,
        )  # fmt: skip

    def installer(self, name: str) -> str | None:
        """Return the program that installed a package; None if it is not installed."""
        found = self.site / f"{name}-1.dist-info" / "INSTALLER"
        return found.read_text("utf-8").strip() if found.exists() else None

    def folders(self) -> str:
        return f"no-index = true\nfind-links = {self.wheels}\n"


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    return Environment(tmp_path_factory.mktemp("locked"))


@pytest.fixture
def without_uv(environment: Environment) -> Iterator[Callable[[str], None]]:
    """Replace uv by a script."""

    def replace(script: str) -> None:
        environment.uv.unlink()
        environment.uv.write_text(script, "utf-8")
        environment.uv.chmod(0o755)

    yield replace
    environment.uv.unlink()
    environment.uv.symlink_to(UV)


def test_uv_installs_from_a_folder_of_pip_s_configuration(environment: Environment) -> None:
    done = environment.install(environment.wheel("alpha"), environment.folders())
    assert done.returncode == 0, done.stderr
    assert (environment.installer("alpha"), environment.installer("project")) == ("uv", "uv")


def test_uv_takes_a_package_from_any_index_of_pip_s_configuration(environment: Environment) -> None:
    """The first index has another build of the version, which its hash refuses."""
    line = environment.wheel("beta")
    first, second = (environment.wheels.parent / name for name in ("first", "second"))
    for index, content in (
        (first, b"another"),
        (second, (environment.wheels / "beta-1-py3-none-any.whl").read_bytes()),
    ):
        (index / "beta").mkdir(parents=True)
        (index / "beta" / "beta-1-py3-none-any.whl").write_bytes(content)
        digest = hashlib.sha256(content).hexdigest()
        (index / "beta" / "index.html").write_text(
            f'<a href="beta-1-py3-none-any.whl#sha256={digest}">beta-1-py3-none-any.whl</a>', "utf-8"
        )
    done = environment.install(line, f"index-url = file://{first}\nextra-index-url = file://{second}\n")
    assert done.returncode == 0, done.stderr
    assert environment.installer("beta") == "uv"


def test_a_package_with_another_hash_is_not_installed(environment: Environment) -> None:
    line = environment.wheel("gamma")
    wrong = line.partition("sha256:")[0] + f"sha256:{'0' * 64}\n"
    done = environment.install(wrong, environment.folders())
    assert done.returncode != 0
    assert environment.installer("gamma") is None


def test_pip_installs_where_uv_fails(environment: Environment, without_uv: Callable[[str], None]) -> None:
    without_uv("#!/bin/sh\nexit 2\n")
    done = environment.install(environment.wheel("delta"), environment.folders())
    assert done.returncode == 0, done.stderr
    assert environment.installer("delta") == "pip"
    assert "uv cannot install this; pip does" in done.stderr


def test_pip_installs_where_uv_cannot_follow_its_configuration(environment: Environment) -> None:
    done = environment.install(environment.wheel("epsilon"), f"{environment.folders()}prefer-binary = true\n")
    assert done.returncode == 0, done.stderr
    assert environment.installer("epsilon") == "pip"
    assert "prefer_binary" in done.stderr


def test_options_about_display_and_constraints_leave_uv_at_work(environment: Environment) -> None:
    constraints = environment.wheels.parent / "constraints.txt"
    constraints.write_text("another<2\n", "utf-8")
    further = f"constraint = {constraints}\ntimeout = 60\nprogress-bar = off\n"
    done = environment.install(environment.wheel("zeta"), environment.folders() + further)
    assert done.returncode == 0, done.stderr
    assert environment.installer("zeta") == "uv"


def test_pip_installs_the_uv_that_the_lock_file_pins(
    environment: Environment, without_uv: Callable[[str], None]
) -> None:
    without_uv("#!/bin/sh\nexit 2\n")
    lock = environment.wheel("eta") + environment.wheel("uv").replace(" --hash", " \\\n    --hash")
    done = environment.install(lock, environment.folders())
    assert done.returncode == 0, done.stderr
    assert environment.installer("uv") == "pip"
