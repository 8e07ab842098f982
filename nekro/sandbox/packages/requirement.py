"""Parse and check package requests of sandboxed code: a distribution's name and versions only.

PEP 508 also has URLs, local paths, markers and extras. A URL would let code choose the source of a
wheel, so only ``name`` and ``name<version specifiers>`` are accepted.
"""

from __future__ import annotations

from dataclasses import dataclass

from packaging.requirements import InvalidRequirement
from packaging.requirements import Requirement as Pep508Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from broker_config.settings import SandboxSettings
from nekro_agent.errors import PackageInstallError

__all__ = ["Requirement", "check_policy", "parse_requirement"]

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
