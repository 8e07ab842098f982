"""The rooms of the house: which top-level package may import which."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
#: From the ground up; a package may import itself and what stands before it.
ORDER = (
    "nekro_agent",
    "runtime",
    "codec",
    "broker_config",
    "messaging",
    "storage",
    "sandbox",
    "agent",
    "workers",
    "cli",
)
#: Exceptions to "everything below": what is named here is all that is allowed.
ONLY = {
    "storage": {"nekro_agent", "runtime.greenlet_bridge", "runtime.completion", "broker_config.settings"},
    "plugin_pkgs": {"nekro_agent"},
}
#: Libraries that a package must not know.
FORBIDDEN_LIBRARIES = {
    "nekro_agent": {"celery", "kombu", "redis", "sqlalchemy", "psycopg", "alembic"},
    "codec": {"celery", "kombu", "redis", "sqlalchemy", "psycopg", "alembic"},
    "storage": {"celery", "kombu", "redis"},
    "agent": {"celery", "kombu", "redis", "sqlalchemy"},
    "plugin_pkgs": {"celery", "kombu", "redis", "sqlalchemy"},
}
PACKAGES = (*ORDER, "plugin_pkgs")


def imports_of(package: str) -> list[tuple[Path, str]]:
    found = []
    for path in sorted((ROOT / package).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Import):
                found += [(path, alias.name) for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
                found.append((path, node.module))
    return found


def is_allowed(package: str, module: str) -> bool:
    top = module.partition(".")[0]
    if top == package or top not in PACKAGES:
        return True
    if package in ONLY:
        return any(module == name or module.startswith(f"{name}.") for name in ONLY[package])
    return top in ORDER[: ORDER.index(package)]


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_imports_only_what_stands_below_it(package: str) -> None:
    wrong = [f"{p.relative_to(ROOT)}: {m}" for p, m in imports_of(package) if not is_allowed(package, m)]
    assert wrong == []


@pytest.mark.parametrize("package", FORBIDDEN_LIBRARIES)
def test_a_package_knows_only_the_libraries_of_its_trade(package: str) -> None:
    wrong = [
        f"{path.relative_to(ROOT)}: {module}"
        for path, module in imports_of(package)
        if module.partition(".")[0] in FORBIDDEN_LIBRARIES[package]
    ]
    assert wrong == []


def test_the_guest_of_the_sandbox_uses_the_standard_library_only() -> None:
    import sys

    guest = ROOT / "sandbox" / "guest"
    inside = {module for path, module in imports_of("sandbox") if path.is_relative_to(guest)}
    # The writer of tagged text is bundled with the guest.
    inside |= {module for path, module in imports_of("codec") if path.name == "tagged.py"}
    names = {module.partition(".")[0] for module in inside - {"codec.tagged"}}
    assert names <= set(sys.stdlib_module_names) | {"sandbox"}


def test_the_wheel_ships_every_package_and_no_other() -> None:
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    shipped = project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    assert sorted(shipped) == sorted(PACKAGES)
