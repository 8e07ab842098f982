"""What sandboxed code may ask for: the name of a distribution and versions, nothing else.

PEP 508 also knows URLs, local paths, markers and extras. A URL would let code choose where a
wheel comes from, so the grammar ends at ``name`` and ``name<version specifiers>``.
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
    """A distribution by its canonical name, and the versions that will do."""

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
        PackageInstallError: it is malformed, or asks for more than a name and versions.
    """
    if len(text) > _MOST_CHARS:
        raise PackageInstallError(f"a package is named in at most {_MOST_CHARS} characters")
    try:
        parsed = Pep508Requirement(text)
    except InvalidRequirement as exc:
        raise PackageInstallError(f"{text!r} is not a package name with versions, such as numpy>=2") from exc
    if parsed.url or parsed.marker or parsed.extras:
        raise PackageInstallError(f"{text!r}: only a name and versions can be asked for, such as numpy>=2")
    return Requirement(name=canonicalize_name(parsed.name), specifiers=parsed.specifier)


def check_policy(requirement: Requirement, settings: SandboxSettings) -> None:
    """Refuse what the operator does not allow.

    Raises:
        PackageInstallError: installing is off, or the name is not on the list.
    """
    if settings.package_install == "off":
        raise PackageInstallError(
            "installing packages is switched off; the operator can allow it (NEKRO_SANDBOX__PACKAGE_INSTALL)"
        )
    allowed = {canonicalize_name(name) for name in settings.package_allow}
    if settings.package_install == "allow_list" and requirement.name not in allowed:
        names = ", ".join(sorted(allowed)) or "none"
        raise PackageInstallError(f"{requirement.name} may not be installed; allowed: {names}")
