"""``dynamic_import_pkg`` with real pip and generated wheels, without a package index."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import importlib.metadata
import sys
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from forked_code import forked
from waiting import WAIT_SECONDS

from nekro_agent import runtime
from nekro_agent.errors import InvalidValueError, PackageInstallError
from nekro_agent.methods import SandboxMethodType
from nekro_agent.packages import layers as package_layers
from nekro_agent.packages.imports import dynamic_import_pkg
from nekro_agent.plugin import NekroPlugin
from nekro_agent.runtime import PackagePolicy
from nekro_agent.schemas.agent_ctx import AgentCtx
from nekro_agent.testing import InMemoryRuntime

pytestmark = pytest.mark.extended


class Wheels:
    """A folder of wheels that pip installs from."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def add(
        self,
        name: str,
        version: str = "1.0",
        *,
        module: str | None = None,
        code: str = "",
        requires: tuple[str, ...] = (),
        extras: tuple[str, ...] = (),
    ) -> None:
        """Make a wheel with one module."""
        info = f"{name.replace('-', '_')}-{version}.dist-info"
        metadata = [f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}"]
        metadata += [f"Provides-Extra: {extra}" for extra in extras]
        metadata += [f"Requires-Dist: {requirement}" for requirement in requires]
        files = {
            f"{module or name.replace('-', '_')}.py": f"VERSION = {version!r}\n{code}",
            f"{info}/METADATA": "\n".join(metadata) + "\n",
            f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        }
        record = ""
        for path, text in files.items():
            digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
            record += f"{path},sha256={digest},{len(text.encode())}\n"
        files[f"{info}/RECORD"] = record + f"{info}/RECORD,,\n"
        wheel = self.directory / f"{name.replace('-', '_')}-{version}-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            for path, text in files.items():
                archive.writestr(path, text)


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Wheels]:
    directory = tmp_path / "wheels"
    directory.mkdir()
    monkeypatch.setenv("PIP_FIND_LINKS", str(directory))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setattr(package_layers, "_active", {})
    path, modules = list(sys.path), set(sys.modules)
    runtime.prepare(data_dir=tmp_path / "data")
    yield Wheels(directory)
    runtime.prepare(data_dir=None)
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        del sys.modules[name]


def layers(tmp_path: Path) -> list[str]:
    return sorted(path.name.rsplit("-", 1)[0] for path in (tmp_path / "data/packages").glob("*/*-*"))


def test_a_package_of_the_environment_is_used_as_it_is(wheels: Wheels, tmp_path: Path) -> None:
    assert dynamic_import_pkg("httpx>=0.20").__name__ == "httpx"
    assert dynamic_import_pkg("PyYAML", import_name="yaml").__name__ == "yaml"
    assert dynamic_import_pkg("pyyaml").__name__ == "yaml"
    assert dynamic_import_pkg("Pydantic_Settings").__name__ == "pydantic_settings"
    assert layers(tmp_path) == []


def test_a_package_of_the_environment_is_never_replaced(wheels: Wheels, tmp_path: Path) -> None:
    wheels.add("pydantic", "1.10.0")
    with pytest.raises(PackageInstallError, match=r"pydantic<2 is required.*plugins may not replace"):
        dynamic_import_pkg("pydantic<2")
    wheels.add("needs-old", requires=("pydantic<2",))
    with pytest.raises(PackageInstallError, match=r"needs-old cannot be installed"):
        dynamic_import_pkg("needs-old")
    assert layers(tmp_path) == []
    assert importlib.metadata.version("pydantic").startswith("2")


def test_a_missing_package_is_installed_once_with_its_dependencies(wheels: Wheels, tmp_path: Path) -> None:
    wheels.add("dep-of-it", "2.0")
    wheels.add("fresh-one", requires=("dep-of-it>=1", "pydantic>=2"), code="import dep_of_it, pydantic")
    module = dynamic_import_pkg("fresh-one")
    assert module.VERSION == "1.0"
    assert layers(tmp_path) == ["fresh-one-1.0"]
    (wheels.directory / "fresh_one-1.0-py3-none-any.whl").unlink()
    assert dynamic_import_pkg("Fresh_One>=0.9") is module
    (layer,) = (tmp_path / "data/packages").glob("*/fresh-one-*")
    installed = sorted(path.name for path in layer.rglob("*.dist-info"))
    assert installed == ["dep_of_it-2.0.dist-info", "fresh_one-1.0.dist-info"]
    assert sys.path[-1].startswith(str(layer))


def test_versions_are_distinguished_and_one_is_used_per_process(wheels: Wheels, tmp_path: Path) -> None:
    for version in ("1.0", "1.5", "2.0"):
        wheels.add("versioned", version)
    assert dynamic_import_pkg("versioned<2").VERSION == "1.5"
    assert dynamic_import_pkg("versioned>=1.2").VERSION == "1.5"
    with pytest.raises(PackageInstallError, match=r"2\.0 is required, but.*uses versioned 1\.5"):
        dynamic_import_pkg("versioned>=2")
    assert layers(tmp_path) == ["versioned-1.5", "versioned-2.0"]


def test_extras_are_installed_too(wheels: Wheels, tmp_path: Path) -> None:
    wheels.add("extra-part", "1.0")
    wheels.add("with-extra", extras=("fast",), requires=('extra-part; extra == "fast"',))
    dynamic_import_pkg("with-extra")
    with pytest.raises(ImportError):
        __import__("extra_part")
    dynamic_import_pkg("with-extra[fast]")
    assert __import__("extra_part").VERSION == "1.0"


def test_the_module_may_have_another_name(wheels: Wheels) -> None:
    wheels.add("beautiful-thing", module="bthing")
    assert dynamic_import_pkg("beautiful-thing", import_name="bthing").VERSION == "1.0"
    assert dynamic_import_pkg("beautiful-thing").__name__ == "bthing"
    with pytest.raises(ImportError, match="has no module nothing; pass import_name="):
        dynamic_import_pkg("beautiful-thing", import_name="nothing")


@pytest.mark.parametrize(
    "spec", ["", "a b", "x>>1", "git+https://x/y", "x @ https://x/y.whl", "-r file", None, 3]
)
def test_invalid_specs_are_refused(spec: str) -> None:
    with pytest.raises(InvalidValueError, match="package spec"):
        dynamic_import_pkg(spec)


def test_an_unknown_package_is_reported_and_leaves_no_files(wheels: Wheels, tmp_path: Path) -> None:
    with pytest.raises(PackageInstallError, match=r"no-such-package cannot be installed: .*No match"):
        dynamic_import_pkg("no-such-package")
    assert layers(tmp_path) == []
    assert not list((tmp_path / "data/packages").glob("*/.part-*"))


def test_an_install_that_takes_too_long_is_stopped(wheels: Wheels) -> None:
    wheels.add("slow-one")
    with pytest.raises(PackageInstallError, match=r"slow-one: pip did not finish within 0\.01 s"):
        dynamic_import_pkg("slow-one", timeout=0.01)  # type: ignore[arg-type]


@pytest.mark.parametrize("mirror", ["file:///x", "nonsense"])
def test_a_mirror_must_be_a_web_address(wheels: Wheels, mirror: str) -> None:
    with pytest.raises(InvalidValueError, match="is not an http"):
        dynamic_import_pkg("fresh-one", mirror=mirror)
    with pytest.raises(InvalidValueError, match="has no TLS"):
        dynamic_import_pkg("fresh-one", mirror="http://mirror.example", trusted_host=False)


async def test_installing_can_be_switched_off_or_limited(
    wheels: Wheels, plugin: NekroPlugin, tmp_path: Path
) -> None:
    wheels.add("listed")
    data = tmp_path / "data"
    async with InMemoryRuntime(plugin, data_dir=data, packages=PackagePolicy(allow=())):
        with pytest.raises(PackageInstallError, match="NEKRO_PLUGINS__PACKAGE_ALLOW"):
            dynamic_import_pkg("listed")
        assert dynamic_import_pkg("httpx").__name__ == "httpx"
    policy = PackagePolicy(allow=("Listed",))
    async with InMemoryRuntime(plugin, data_dir=data, packages=policy):
        with pytest.raises(PackageInstallError, match="PACKAGE_ALLOW does not list other"):
            dynamic_import_pkg("other")
        assert dynamic_import_pkg("listed").VERSION == "1.0"


async def test_other_calls_continue_while_a_method_installs(
    wheels: Wheels, plugin: NekroPlugin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheels.add("in-coroutine")
    may_install, waiting = threading.Event(), threading.Event()
    run_pip = package_layers._run_pip

    def when_allowed(*arguments: object) -> None:
        waiting.set()
        assert may_install.wait(WAIT_SECONDS)
        run_pip(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(package_layers, "_run_pip", when_allowed)

    @plugin.mount_sandbox_method(SandboxMethodType.TOOL, "install")
    async def install(ctx: AgentCtx) -> str:
        await asyncio.sleep(0)
        return str(dynamic_import_pkg("in-coroutine").VERSION) + ctx.chat_key

    @plugin.mount_sandbox_method(SandboxMethodType.TOOL, "other")
    async def other(ctx: AgentCtx) -> str:
        await asyncio.sleep(0)
        return "served"

    async with InMemoryRuntime(plugin, data_dir=tmp_path / "data") as world:
        task = asyncio.create_task(world.call("install"))
        while not waiting.is_set():
            await asyncio.sleep(0)
        assert (await world.call("other")).value == "served"
        may_install.set()
        assert (await task).value == "1.0test-chat"


def test_five_processes_install_a_package_once(wheels: Wheels, tmp_path: Path) -> None:
    wheels.add("fleet-wide")
    code = (
        "import sys; from pathlib import Path; from nekro_agent import runtime\n"
        "from nekro_agent.packages.imports import dynamic_import_pkg\n"
        f"runtime.prepare(data_dir=Path({str(tmp_path / 'data')!r}))\n"
        "print(dynamic_import_pkg('fleet-wide').__file__)"
    )
    processes = [forked(code) for _ in range(5)]
    outputs = {process.communicate(timeout=WAIT_SECONDS)[0].strip() for process in processes}
    assert len(outputs) == 1 and "fleet-wide-1.0" in outputs.pop()
    assert layers(tmp_path) == ["fleet-wide-1.0"]
