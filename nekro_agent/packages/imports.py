"""``dynamic_import_pkg``: installs packages that plugins require, once for all workers."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from packaging.requirements import InvalidRequirement, Requirement

from nekro_agent import layout, placeholders, runtime
from nekro_agent.core.logger import get_sub_logger
from nekro_agent.errors import InvalidValueError, PackageInstallError
from nekro_agent.execution import greenlets as bridge
from nekro_agent.packages.contexts import installed_name
from nekro_agent.packages.layers import (
    Layer,
    LayerStore,
    PipOptions,
    base_version,
    satisfies,
    top_level_names,
)

__all__ = ["dynamic_import_pkg"]

_log = get_sub_logger("packages")


def dynamic_import_pkg(
    package_spec: str,
    import_name: str | None = None,
    *,
    mirror: str | None = None,
    trusted_host: bool = True,
    timeout: int = 300,
    repo_dir: str | Path | None = None,
) -> ModuleType:
    """Import a package, installing it first if no satisfying version is available.

    A package of the workers' own environment is used and never replaced. Any other package is
    installed once into a directory that all workers of the data root share. Inside a plugin's
    coroutine the event loop continues meanwhile; during a plugin's import the call blocks.

    Args:
        package_spec: name with optional extras and versions, ``"requests[socks]>=2.25"``.
        import_name: module to import; None derives it from the package.
        mirror: URL of the package index; None leaves it to pip's configuration.
        trusted_host: whether a mirror without TLS may be used.
        timeout: time limit in seconds for waiting and installing together.
        repo_dir: another directory to install into.

    Raises:
        InvalidValueError: the spec is invalid.
        PackageInstallError: installing is disabled or failed, or another version is in use.
        ImportError: the package is installed but has no such module.
    """
    requirement = _parsed(package_spec)
    caller = str(sys._getframe(1).f_globals.get("__name__", ""))
    try:
        module = _provided(requirement, import_name, mirror, trusted_host, timeout, repo_dir)
    except (PackageInstallError, ImportError) as exc:
        placeholders.record_lost(caller, requirement.name, f"{type(exc).__name__}: {exc}")
        raise
    placeholders.record_lost(caller, requirement.name, None)
    return module


def _provided(
    requirement: Requirement,
    import_name: str | None,
    mirror: str | None,
    trusted_host: bool,
    timeout: int,
    repo_dir: str | Path | None,
) -> ModuleType:
    options = PipOptions(mirror=mirror, allow_plain_http=trusted_host, timeout_seconds=timeout)
    if not _in_environment(requirement):
        store = LayerStore(Path(repo_dir) if repo_dir else layout.packages_dir(runtime.data_root()))
        layer = store.find(requirement) or _install(store, requirement, options)
        layer.activate()
    return _imported(requirement, import_name)


def _parsed(package_spec: str) -> Requirement:
    try:
        requirement = Requirement(package_spec)
    except (InvalidRequirement, TypeError) as exc:
        raise InvalidValueError(
            f"package spec {package_spec!r} is not valid; write a name and versions, like 'requests>=2.25.0'"
        ) from exc
    if requirement.url:
        raise InvalidValueError(
            f"package spec {package_spec!r} names a URL; only names of the package index are accepted"
        )
    return requirement


def _in_environment(requirement: Requirement) -> bool:
    """Whether the workers' own environment satisfies the requirement, including extras.

    Raises:
        PackageInstallError: it has another version of the package, which must not be replaced.
    """
    version = base_version(requirement.name)
    if version is None:
        return False
    if not requirement.specifier.contains(version, prereleases=True):
        raise PackageInstallError(
            f"{requirement} is required, but the workers' own environment has {requirement.name} {version}, "
            "which plugins may not replace; relax the plugin's requirement or upgrade the environment"
        )
    return satisfies(requirement)


def _install(store: LayerStore, requirement: Requirement, options: PipOptions) -> Layer:
    _check_policy(requirement)
    fleet = runtime.package_policy().fleet
    _log.bind(requirement=str(requirement)).info("package_installation_started")
    if bridge.can_wait():
        return bridge.wait(asyncio.to_thread(store.install, requirement, options, fleet))
    with contextlib.suppress(RuntimeError):
        asyncio.get_running_loop()
        # It was called in a task that the plugin created, which cannot wait for a thread.
        _log.bind(
            requirement=str(requirement), fix="call dynamic_import_pkg in the method itself or at import"
        ).warning("package_installation_blocks_event_loop")
    return store.install(requirement, options, fleet)


def _check_policy(requirement: Requirement) -> None:
    policy = runtime.package_policy()
    if not policy.allows(requirement.name):
        raise PackageInstallError(
            f"{requirement} is not installed, and NEKRO_PLUGINS__PACKAGE_ALLOW does not list "
            f"{requirement.name}"
        )


def _imported(requirement: Requirement, import_name: str | None) -> ModuleType:
    importlib.invalidate_caches()
    names = [import_name] if import_name else _module_names(requirement.name)
    for name in names:
        actual = installed_name(name)
        if _exists(actual):
            return importlib.import_module(actual)
    raise ImportError(
        f"package {requirement.name} is installed, but has no module {' or '.join(names)}; "
        "pass import_name= with the name that its documentation imports"
    )


def _exists(module_name: str) -> bool:
    try:
        return importlib.util.find_spec(module_name) is not None
    except (ImportError, ValueError):
        return False


def _module_names(package: str) -> list[str]:
    """Return likely module names: spellings of the package's name, then its only top-level module if any."""
    guesses = [package.replace("-", "_"), package.replace("-", "_").lower(), package.replace("-", ".")]
    found = top_level_names(package)
    return list(dict.fromkeys([*guesses, *(found if len(found) == 1 else [])]))
