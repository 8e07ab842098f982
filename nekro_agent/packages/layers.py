"""Layers: directories with one installed package and the dependencies that the workers' environment lacks.

    <packages>/<interpreter>/
    ├── .lock                          held while pip runs
    └── <name>-<version>-<random>/     complete when it has this name
        ├── layer.json
        └── …/site-packages/

A layer is installed under a temporary name and then renamed, so other workers see it complete or not
at all. pip is constrained to the versions of the workers' environment, and layers come after that
environment in ``sys.path``: they add modules and replace none.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import importlib.metadata
import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
import urllib.parse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from nekro_agent.core.logger import get_sub_logger
from nekro_agent.durations import POLL_SECONDS, STALE_SECONDS
from nekro_agent.errors import InvalidValueError, PackageInstallError
from nekro_agent.execution.tied_process import tied_to_this_process
from nekro_agent.files.private_files import make_directory, open_private, write_private
from nekro_agent.packages.contexts import add_installed

__all__ = [
    "MANIFEST",
    "FleetPackages",
    "Layer",
    "LayerStore",
    "PipOptions",
    "base_version",
    "satisfies",
    "top_level_names",
]

#: Name of the file in a layer that describes it.
MANIFEST: Final = "layer.json"
_TEMPORARY: Final = ".part-"
_CREDENTIALS = re.compile(r"(?<=://)[^/\s@]+@")
_log = get_sub_logger("packages")

#: Active layers by canonical package name.
_active: dict[str, Layer] = {}


@dataclass(frozen=True, kw_only=True)
class PipOptions:
    """Options of a pip call."""

    mirror: str | None
    allow_plain_http: bool
    timeout_seconds: float


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One installed package with its additional dependencies."""

    site: Path
    name: str
    version: str
    extras: frozenset[str]

    def serves(self, requirement: Requirement) -> bool:
        """Whether the layer satisfies a requirement."""
        return (
            self.name == canonicalize_name(requirement.name)
            and requirement.specifier.contains(self.version, prereleases=True)
            and self.extras >= frozenset(requirement.extras)
        )

    def activate(self) -> None:
        """Make the layer importable in this process.

        Raises:
            PackageInstallError: another version of the package is already in use.
        """
        active = _active.setdefault(self.name, self)
        if active.version != self.version:
            raise PackageInstallError(
                f"{self.name} {self.version} is required, but another plugin of this process uses "
                f"{self.name} {active.version}; let both require the same version"
            )
        add_installed(folder=self.site)
        if str(self.site) not in sys.path:
            # At the end, so that the workers' own modules have priority over a layer's.
            sys.path.append(str(self.site))


class FleetPackages(Protocol):
    """The layers of hosts that share no disk; methods block, and log what fails."""

    def bring(self, requirement: Requirement, directory: Path, *, seconds: float) -> bool:
        """Make a directory that has the files of a layer; False if no host has stored one that serves."""
        ...

    def keep(self, layer: Layer, directory: Path, *, seconds: float) -> None:
        """Store a layer that this host has installed."""
        ...


class LayerStore:
    """All layers of one data root for this interpreter."""

    def __init__(self, directory: Path) -> None:
        self._root = directory / f"{sys.implementation.cache_tag}-{sysconfig.get_platform()}"

    def find(self, requirement: Requirement) -> Layer | None:
        """Return a layer that satisfies the requirement: the active one, else the newest version."""
        active = _active.get(canonicalize_name(requirement.name))
        if active is not None and active.serves(requirement):
            return active
        serving = [layer for layer in self._layers() if layer.serves(requirement)]
        return max(serving, key=lambda layer: Version(layer.version), default=None)

    def install(
        self, requirement: Requirement, options: PipOptions, fleet: FleetPackages | None = None
    ) -> Layer:
        """Install under the lock of the directory; a layer that another worker finished meanwhile is used.

        Args:
            fleet: where other hosts have stored what they installed.

        Raises:
            PackageInstallError: pip failed, or the time limit passed.
        """
        deadline = time.monotonic() + options.timeout_seconds
        make_directory(self._root)
        with self._locked(deadline, requirement):
            found = self.find(requirement)
            if found is not None:
                return found
            self._remove_stale()
            part = self._root / f"{_TEMPORARY}{secrets.token_hex(6)}"
            try:
                left_seconds = max(deadline - time.monotonic(), 0.1)
                if fleet is not None and fleet.bring(requirement, part, seconds=left_seconds):
                    return self._publish(requirement, part)
                _run_pip(requirement, part, options, deadline)
                layer = self._publish(requirement, part)
            finally:
                shutil.rmtree(part, ignore_errors=True)
            if fleet is not None:
                directory = self._root / layer.site.relative_to(self._root).parts[0]
                fleet.keep(layer, directory, seconds=options.timeout_seconds)
            return layer

    def _layers(self) -> Iterator[Layer]:
        if not self._root.is_dir():
            return
        for entry in self._root.iterdir():
            manifest = entry / MANIFEST
            if entry.name.startswith(".") or not manifest.is_file():
                continue
            content = json.loads(manifest.read_text("utf-8"))
            yield Layer(
                site=entry / content["site"],
                name=content["name"],
                version=content["version"],
                extras=frozenset(content["extras"]),
            )

    def _publish(self, requirement: Requirement, part: Path) -> Layer:
        name = canonicalize_name(requirement.name)
        site = _site_directory(part)
        found = {canonicalize_name(d.name): d for d in importlib.metadata.distributions(path=[str(site)])}
        if name not in found:
            raise PackageInstallError(f"pip reported success, but {requirement.name} is not in {site.name}")
        version = found[name].version
        content = {
            "name": name,
            "version": version,
            "extras": sorted(requirement.extras),
            "site": str(site.relative_to(part)),
            "distributions": {key: dist.version for key, dist in sorted(found.items())},
        }
        write_private(part / MANIFEST, json.dumps(content, indent=1))
        final = self._root / f"{name}-{version}-{secrets.token_hex(4)}"
        part.rename(final)
        _log.bind(package=name, version=version).success("package_installed")
        return Layer(
            site=final / site.relative_to(part),
            name=name,
            version=version,
            extras=frozenset(requirement.extras),
        )

    @contextlib.contextmanager
    def _locked(self, deadline: float, requirement: Requirement) -> Iterator[None]:
        with open_private(self._root / ".lock", "a") as lock:
            while True:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        raise PackageInstallError(
                            f"{requirement}: another worker has been installing packages for too long"
                        ) from None
                    time.sleep(POLL_SECONDS)
            yield

    def _remove_stale(self) -> None:
        limit = time.time() - STALE_SECONDS
        for entry in self._root.glob(f"{_TEMPORARY}*"):
            if entry.stat().st_mtime < limit:
                shutil.rmtree(entry, ignore_errors=True)


def base_version(name: str) -> Version | None:
    """Return the version of a package in the workers' own environment, or None."""
    return _environment().get(canonicalize_name(name))


def satisfies(requirement: Requirement, *, _seen: frozenset[str] = frozenset()) -> bool:
    """Whether the environment has the package and everything that the requested extras need."""
    version = base_version(requirement.name)
    if version is None or not requirement.specifier.contains(version, prereleases=True):
        return False
    needed = importlib.metadata.requires(requirement.name) or []
    for extra in requirement.extras:
        key = f"{canonicalize_name(requirement.name)}[{extra}]"
        if key in _seen:
            continue
        for text in needed:
            inner = Requirement(text)
            if inner.marker is None or "extra" not in str(inner.marker):
                continue
            if inner.marker.evaluate({"extra": extra}) and not satisfies(inner, _seen=_seen | {key}):
                return False
    return True


def top_level_names(package: str) -> list[str]:
    """Return the top-level modules of an installed package."""
    try:
        files = importlib.metadata.distribution(package).files or []
    except importlib.metadata.PackageNotFoundError:
        return []
    names = {file.parts[0].removesuffix(".py") for file in files if file.suffix in (".py", ".so")}
    return sorted(name for name in names if name.isidentifier() and not name.startswith("_"))


@functools.cache
def _environment() -> dict[str, Version]:
    """Return the packages of the environment, read once before any layer is added."""
    found: dict[str, Version] = {}
    for dist in importlib.metadata.distributions():
        with contextlib.suppress(InvalidVersion, TypeError):
            found.setdefault(canonicalize_name(dist.name), Version(dist.version))
    return found


def _run_pip(requirement: Requirement, prefix: Path, options: PipOptions, deadline: float) -> None:
    with tempfile.NamedTemporaryFile("w", suffix=".txt", encoding="utf-8") as constraints:
        constraints.writelines(f"{name}=={version}\n" for name, version in _environment().items())
        constraints.flush()
        command = tied_to_this_process(
            sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "install",
            "--prefix", str(prefix), "--no-warn-script-location", "--no-warn-conflicts", "--no-compile",
            "--constraint", constraints.name, *_index_arguments(options), str(requirement),
        )  # fmt: skip
        # Settings in the environment contain secrets, which a package's build script must not see.
        environment = {key: value for key, value in os.environ.items() if not key.startswith("NEKRO_")}
        with subprocess.Popen(  # noqa: S603  # our interpreter, arguments parsed above
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=environment,
            start_new_session=True,
            umask=0o077,
        ) as process:
            try:
                output, _ = process.communicate(timeout=max(deadline - time.monotonic(), 0.1))
            except BaseException as exc:
                os.killpg(process.pid, signal.SIGKILL)
                if isinstance(exc, subprocess.TimeoutExpired):
                    raise PackageInstallError(
                        f"{requirement}: pip did not finish within {options.timeout_seconds:g} s"
                    ) from exc
                raise
    if process.returncode != 0:
        raise PackageInstallError(f"{requirement} cannot be installed: {_failure(output)}")


def _index_arguments(options: PipOptions) -> list[str]:
    if options.mirror is None:
        return []
    parts = urllib.parse.urlsplit(options.mirror)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise InvalidValueError(f"mirror {options.mirror!r} is not an http:// or https:// URL")
    arguments = ["--index-url", options.mirror]
    if parts.scheme == "http":
        if not options.allow_plain_http:
            raise InvalidValueError(f"mirror {options.mirror!r} has no TLS; pass trusted_host=True to use it")
        arguments += ["--trusted-host", parts.hostname]
    return arguments


def _failure(output: str) -> str:
    """Return pip's own error lines, without credentials of index URLs."""
    lines = [line.strip() for line in output.split("\n") if line.strip()]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR:")]
    return _CREDENTIALS.sub("***@", " ".join(errors or lines[-3:]))[:1000]


def _site_directory(prefix: Path) -> Path:
    """Return the directory below a prefix where pip put the packages; its name varies by distribution."""
    for info in sorted(prefix.rglob("*.dist-info")):
        return info.parent
    raise PackageInstallError("pip installed nothing")
