"""Requests for packages, and package layers on disk: content-addressed, chosen by container key.

PEP 508 also has URLs, local paths, markers and extras. A URL would let code choose the source of a
wheel, so only ``name`` and ``name<version specifiers>`` are accepted.

<root>/
├── layers/<digest>/            importable files, never changed once published
├── built/<name>-<hash>.json    the layer of a requirement, with the wheels' hashes
├── chosen/<hash>.json          the digests that the sandboxes of a container key mount, oldest first
├── building/                   work in progress, one directory per build
└── tools/                      the installer that builds run"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
import stat
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Protocol

from packaging.requirements import InvalidRequirement
from packaging.requirements import Requirement as Pep508Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from broker_config.settings import SandboxSettings
from nekro.base.plain import known_fields
from nekro.sandbox.leftovers import ServiceId, own_id
from nekro_agent.errors import PackageInstallError
from nekro_agent.files import safe_files
from nekro_agent.files.private_files import make_directory, write_private

__all__ = [
    "Built",
    "FleetLayers",
    "LayerPublisher",
    "Requirement",
    "built_of",
    "check_policy",
    "parse_requirement",
]


_MOST_CHARS = 200


@dataclass(frozen=True, kw_only=True)
class Requirement:
    """A distribution by its canonical name, and the accepted versions."""

    name: str
    specifiers: SpecifierSet

    def __str__(self) -> str:
        return f"{self.name}{self.specifiers}"

    def allows(self, version: str) -> bool:
        """Whether a version satisfies it."""
        try:
            return self.specifiers.contains(Version(version), prereleases=True)
        except InvalidVersion:
            return False


def parse_requirement(text: str) -> Requirement:
    """Parse ``numpy`` or ``numpy>=2,<3``.

    Raises:
        PackageInstallError: it is malformed, or has more than a name and versions.
    """
    if len(text) > _MOST_CHARS:
        raise PackageInstallError(f"a package request has at most {_MOST_CHARS} characters")
    try:
        parsed = Pep508Requirement(text)
    except InvalidRequirement as exc:
        raise PackageInstallError(f"{text!r} is not a package name with versions, such as numpy>=2") from exc
    if parsed.url or parsed.marker or parsed.extras:
        raise PackageInstallError(f"{text!r}: only a name and versions are allowed, such as numpy>=2")
    return Requirement(name=canonicalize_name(parsed.name), specifiers=parsed.specifier)


def check_policy(requirement: Requirement, settings: SandboxSettings) -> None:
    """Refuse a requirement that the settings do not allow.

    Raises:
        PackageInstallError: installing is off, or the name is not on the list.
    """
    if not settings.package_allow:
        raise PackageInstallError(
            "package installation is disabled; the operator can enable it (NEKRO_SANDBOX__PACKAGE_ALLOW)"
        )
    allowed = {canonicalize_name(name) for name in settings.package_allow}
    if "*" not in allowed and requirement.name not in allowed:
        raise PackageInstallError(
            f"{requirement.name} may not be installed; allowed: {', '.join(sorted(allowed))}"
        )


_MOST_LAYERS: Final = 32

_MOST_NAMES: Final = 100_000


@dataclass(frozen=True, kw_only=True)
class Built:
    """The layer of a requirement."""

    requirement: str
    name: str
    version: str
    digest: str
    #: Top-level modules in it, the distribution's own first.
    modules: tuple[str, ...]
    #: Wheel file name to SHA-256.
    wheels: Mapping[str, str]


def built_of(record: Mapping[str, Any]) -> Built:
    """Return the layer that a record describes."""
    return Built(**{**known_fields(Built, record), "modules": tuple(record["modules"])})


class FleetLayers(Protocol):
    """The layers of hosts that share no disk."""

    async def bring(self, container_key: str) -> None:
        """Give this host the layers that the container's sandboxes mount."""
        ...

    async def find(self, requirement: Requirement) -> Built | None:
        """Give this host the layer of a requirement, if another host has built it."""
        ...

    async def keep(self, requirement: Requirement, built: Built) -> None:
        """Store the layer of a requirement that this host has built."""
        ...

    async def choose(self, container_key: str, digest: str) -> None:
        """Let all hosts know that the container's sandboxes mount a layer that this host has."""
        ...


class LayerPublisher:
    """Reads and publishes layers; safe between processes, as files and layers appear by a rename."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def new_work_dir(self) -> Path:
        """Return a unique path below ``building``; removes directories of services that have ended."""
        building = self.root / "building"
        make_directory(building, passable=True)
        for path in building.iterdir():
            owner = ServiceId.of_file_name(path.name.partition("+")[0])
            if owner is not None and owner.is_gone(still_runs=False):
                shutil.rmtree(path, ignore_errors=True)
        # The whole id: services of several hosts may share this directory.
        return building / f"{own_id().file_name}+{secrets.token_hex(8)}"

    def find(self, requirement: Requirement) -> Built | None:
        """Return the layer of a requirement; None when it was not built or no longer exists."""
        try:
            record: dict[str, Any] = json.loads(self._record_path(requirement).read_text())
        except FileNotFoundError:
            return None
        built = built_of(record)
        return built if self.path(built.digest).is_dir() else None

    def path(self, digest: str) -> Path:
        """Return the directory of a layer."""
        return self.root / "layers" / digest

    def chosen(self, container_key: str) -> tuple[str, ...]:
        """Return the digests that a container's sandboxes mount."""
        try:
            digests: list[str] = json.loads(self._chosen_path(container_key).read_text())
        except FileNotFoundError:
            return ()
        return tuple(digest for digest in digests if self.path(digest).is_dir())

    def choose(self, container_key: str, digest: str) -> None:
        """Mount a layer in the container's sandboxes from the next one on.

        Raises:
            PackageInstallError: it has the maximum of 32 layers.
        """
        digests = [*self.chosen(container_key)]
        if digest in digests:
            return
        if len(digests) >= _MOST_LAYERS:
            raise PackageInstallError(f"this chat has {_MOST_LAYERS} packages already; no more can be added")
        self.set_chosen(container_key, [*digests, digest])

    def set_chosen(self, container_key: str, digests: Sequence[str]) -> None:
        """Mount these layers in the container's sandboxes from the next one on."""
        _write_json(self._chosen_path(container_key), digests)

    def adopt(self, source: Path, digest: str, *, most_bytes: int) -> None:
        """Copy a directory that was made from an archive into the layer with a digest.

        Raises:
            PackageInstallError: its files have another digest.
        """
        staging = self.new_work_dir()
        make_directory(staging, passable=True)
        try:
            found = _copy_tree(source, staging, most_bytes=most_bytes)
            if found != digest:
                raise PackageInstallError(f"the archive of layer {digest} has files with digest {found}")
            self._place(staging, digest)
        finally:
            shutil.rmtree(staging, ignore_errors=True)

    def record(self, requirement: Requirement, built: Built) -> None:
        """Record the layer of a requirement."""
        _write_json(self._record_path(requirement), asdict(built))

    def record_name(self, requirement: Requirement) -> str:
        """Return a name that is unique for a requirement."""
        return f"{requirement.name}-{_short_hash(str(requirement))}"

    def chosen_name(self, container_key: str) -> str:
        """Return a name that is unique for a container key."""
        return _short_hash(container_key)

    def _place(self, staging: Path, digest: str) -> None:
        target = self.path(digest)
        make_directory(target.parent, passable=True)
        if not target.exists():
            staging.rename(target)

    def publish(
        self,
        source: Path,
        requirement: Requirement,
        *,
        version: str,
        wheels: Mapping[str, str],
        most_bytes: int,
    ) -> Built:
        """Copy a builder's directory ``source`` into a layer and record it.

        Only regular files are copied, as the builder's directory is hostile.

        Raises:
            PackageInstallError: it contains nothing to import.
        """
        staging = self.new_work_dir()
        make_directory(staging, passable=True)
        try:
            digest = _copy_tree(source, staging, most_bytes=most_bytes)
            modules = _importable(staging, requirement.name)
            if not modules:
                raise PackageInstallError(f"{requirement} contains nothing that can be imported")
            self._place(staging, digest)
        finally:
            shutil.rmtree(staging, ignore_errors=True)
        built = Built(
            requirement=str(requirement),
            name=requirement.name,
            version=version,
            digest=digest,
            modules=modules,
            wheels=wheels,
        )
        self.record(requirement, built)
        return built

    def _record_path(self, requirement: Requirement) -> Path:
        return self.root / "built" / f"{self.record_name(requirement)}.json"

    def _chosen_path(self, container_key: str) -> Path:
        return self.root / "chosen" / f"{self.chosen_name(container_key)}.json"


def _short_hash(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def _write_json(path: Path, value: object) -> None:
    write_private(path, json.dumps(value))


def _copy_tree(source: Path, target: Path, *, most_bytes: int) -> str:
    """Copy regular files and return the digest of their paths and contents."""
    entries = []
    for node in sorted(safe_files.walk(source, max_entries=_MOST_NAMES), key=lambda node: node.path):
        destination = target / node.path
        if stat.S_ISDIR(node.info.st_mode):
            destination.mkdir(parents=True, exist_ok=True)
        elif stat.S_ISREG(node.info.st_mode):
            destination.parent.mkdir(parents=True, exist_ok=True)
            size = safe_files.copy_out(source, node.path, destination=destination, max_bytes=most_bytes)
            most_bytes -= size
            # Readable for the code's user, not writable and not executable.
            destination.chmod(0o444)
            entries.append(f"{node.path}\0{_file_hash(destination)}")
    for directory, _, _ in os.walk(target):
        Path(directory).chmod(0o755)
    return hashlib.sha256("\n".join(entries).encode("utf-8", "surrogateescape")).hexdigest()


def _file_hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _importable(layer: Path, name: str) -> tuple[str, ...]:
    """Return top-level module names, those of distribution ``name`` first."""
    own: list[str] = []
    for record in layer.glob("*.dist-info/RECORD"):
        distribution = record.parent.name.split("-")[0].replace("_", "-").lower()
        if distribution == name:
            lines = record.read_text("utf-8", "replace").split("\n")
            own = [line.split(",")[0].split("/")[0] for line in lines if line]
    everything = sorted(path.name for path in layer.iterdir())
    modules = [_module_name(layer / entry) for entry in (*own, *everything)]
    return tuple(dict.fromkeys(module for module in modules if module))


def _module_name(path: Path) -> str:
    if path.is_dir():
        return path.name if path.name.isidentifier() and path.name != "__pycache__" else ""
    if path.suffix in (".py", ".so") and path.is_file():
        stem = path.name.split(".")[0]
        return stem if stem.isidentifier() else ""
    return ""
