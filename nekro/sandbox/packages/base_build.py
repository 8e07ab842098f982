"""Build the base layer on the host: pinned wheels only, so that no code of a package runs meanwhile.

One exception: matplotlib of the pinned set lists its fonts, which takes a second, once here instead of
in every run.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.metadata
import json
import os
import re
import secrets
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from packaging.requirements import Requirement as Pin
from packaging.utils import canonicalize_name

from broker_config.settings import SandboxSettings
from nekro.sandbox.packages.base import CURRENT, MANIFEST, base_root, python_directory, read_base
from nekro.sandbox.packages.layers import Requirement, parse_requirement
from nekro_agent.errors import PackageInstallError
from nekro_agent.execution.tied_process import tied_to_this_process

__all__ = ["add_packages", "build_base", "remove_packages"]

_DEFAULTS: Final = Path(__file__).with_name("default.txt")
_NAMES: Final = Path(__file__).with_name("default.in")
#: A replaced version is kept for longer than any sandbox runs that has mounted it.
_KEEP_SECONDS: Final = 86_400
#: Time limit of pip for all packages: 60 MB over a slow network.
_INSTALL_SECONDS: Final = 1800
#: Written in matplotlib's own configuration file: no display, and a glyph that the first font lacks comes
#: from the next one.
_MATPLOTLIBRC: Final = "\nbackend: agg\nfont.family: sans-serif, Noto Sans SC, Noto Sans KR\n"
_FONTS: Final = ("NotoSansSC-Regular.otf", "NotoSansKR-Regular.otf")
_LIST_FONTS: Final = """
import os, sys
sys.path.insert(0, sys.argv[1])
from matplotlib import font_manager, get_data_path
fonts = font_manager.fontManager
inside = get_data_path()
fonts.ttflist = [entry for entry in fonts.ttflist if entry.fname.startswith(inside)]
fonts.afmlist = [entry for entry in fonts.afmlist if entry.fname.startswith(inside)]
name = f"fontlist-v{font_manager.FontManager.__version__}.json"
font_manager.json_dump(fonts, os.path.join(sys.argv[2], name))
"""


def build_base(settings: SandboxSettings, *, pip_arguments: str = "") -> bool:
    """Build the default set with what was added to it; returns False when it is there already.

    Raises:
        PackageInstallError: pip failed, or the directory cannot be written; nothing has changed.
    """
    return _change(settings, lambda added: added, pip_arguments=pip_arguments)


def add_packages(settings: SandboxSettings, names: Sequence[str], *, pip_arguments: str = "") -> bool:
    """Add packages (``name`` or ``name==1.2``) with their dependencies; see ``build_base``.

    Raises:
        PackageInstallError: a name is malformed, part of the default set, or has no wheel; pip failed.
    """
    requirements = [parse_requirement(name) for name in names]
    defaults = _default_pins()
    for requirement in requirements:
        if requirement.name in defaults:
            raise PackageInstallError(
                f"{requirement.name} {defaults[requirement.name]} is in the default set already"
            )

    def with_new(added: dict[str, list[str]]) -> dict[str, list[str]]:
        kept = {name: lines for name, lines in added.items() if name not in {r.name for r in requirements}}
        pins = {line.split(" ")[0] for lines in kept.values() for line in lines}
        for requirement in requirements:
            kept[requirement.name] = _resolve(requirement, defaults, pins, pip_arguments)
            pins |= {line.split(" ")[0] for line in kept[requirement.name]}
        return kept

    return _change(settings, with_new, pip_arguments=pip_arguments)


def remove_packages(settings: SandboxSettings, names: Sequence[str], *, pip_arguments: str = "") -> bool:
    """Remove added packages, and dependencies that no other one needs; see ``build_base``.

    Raises:
        PackageInstallError: a package was not added; the default set cannot be removed.
    """
    wanted = {canonicalize_name(name) for name in names}

    def without(added: dict[str, list[str]]) -> dict[str, list[str]]:
        for name in sorted(wanted - added.keys()):
            what = "is in the default set" if name in _default_pins() else "was not added"
            raise PackageInstallError(f"{name} {what}; added packages: {', '.join(sorted(added)) or 'none'}")
        return {name: lines for name, lines in added.items() if name not in wanted}

    return _change(settings, without, pip_arguments=pip_arguments)


def _change(settings: SandboxSettings, edit: Any, *, pip_arguments: str) -> bool:
    root = base_root(settings)
    try:
        with _locked(root):
            present = read_base(settings)
            added: dict[str, list[str]] = edit(dict(present.added) if present else {})
            digest = _digest(added)
            if present is not None and present.digest == digest:
                return False
            _publish(root, added, digest, pip_arguments)
            _drop_old(root)
    except OSError as exc:
        raise PackageInstallError(
            f"{root} cannot be written ({exc.strerror or exc}); set NEKRO_SANDBOX__PACKAGES_DIR to a"
            " directory of this user"
        ) from exc
    return True


@contextlib.contextmanager
def _locked(root: Path) -> Iterator[None]:
    """Let one process at a time change the layer."""
    root.mkdir(parents=True, exist_ok=True)
    with (root / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _publish(root: Path, added: dict[str, list[str]], digest: str, pip_arguments: str) -> None:
    staging = root / f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{secrets.token_hex(4)}"
    staging.mkdir(mode=0o755)
    try:
        site = staging / python_directory()
        lines = _DEFAULTS.read_text() + "".join(
            f"{line}\n" for line in sorted({line for lines in added.values() for line in lines})
        )
        with tempfile.NamedTemporaryFile("w", suffix=".txt") as pins:
            pins.write(lines)
            pins.flush()
            _pip(
                "install", "--quiet", "--no-deps", "--require-hashes", "--no-compile", "--no-warn-conflicts",
                "--target", str(site), "--requirement", pins.name, arguments=pip_arguments,
            )  # fmt: skip
        if (site / "matplotlib").is_dir():
            _finish_matplotlib(staging, site)
        _drop_tests(site)
        _compile(site)
        _write_manifest(staging, site, added, digest)
        _open_for_all(staging)
        link = root / f"{CURRENT}.new"
        link.unlink(missing_ok=True)
        link.symlink_to(staging.name)
        link.rename(root / CURRENT)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise


def _compile(site: Path) -> None:
    """Compile the modules, those without errors.

    In a process of its own: several processes compile, and forks of this one would inherit its threads and
    its connections to Redis, at which the hooks of kombu after a fork can wait for ever.
    """
    # Without checks against the sources, which do not change.
    how = ("-qq", "-j", "0", "--invalidation-mode", "unchecked-hash")
    command = tied_to_this_process(sys.executable, "-P", "-m", "compileall", *how, str(site))
    try:
        subprocess.run(  # noqa: S603 - this interpreter
            command, capture_output=True, timeout=_INSTALL_SECONDS, check=False, start_new_session=True
        )
    except subprocess.TimeoutExpired as exc:
        raise PackageInstallError(f"the packages were not compiled within {_INSTALL_SECONDS} s") from exc


def _pip(*words: str, arguments: str) -> str:
    command = tied_to_this_process(
        sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", *words,
        "--only-binary", ":all:", *shlex.split(arguments),
    )  # fmt: skip
    try:
        done = subprocess.run(  # noqa: S603 - pip of this environment
            command,
            capture_output=True,
            text=True,
            timeout=_INSTALL_SECONDS,
            check=False,
            start_new_session=True,
        )
    except subprocess.TimeoutExpired as exc:
        raise PackageInstallError(f"pip did not end within {_INSTALL_SECONDS} s") from exc
    if done.returncode:
        errors = [line for line in done.stderr.split("\n") if line.startswith("ERROR")]
        raise PackageInstallError("; ".join(errors[-3:]) or f"pip ended with {done.returncode}")
    return done.stdout


def _resolve(
    requirement: Requirement, defaults: dict[str, str], pins: Iterable[str], arguments: str
) -> list[str]:
    """Return the pinned lines of a package and of those dependencies that the default set lacks."""
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as constraints:
        constraints.write("".join(f"{name}=={version}\n" for name, version in defaults.items()))
        constraints.write("".join(f"{pin}\n" for pin in pins))
        constraints.flush()
        report = json.loads(
            _pip(
                "install", "--quiet", "--dry-run", "--ignore-installed", "--report", "-",
                "--constraint", constraints.name, str(requirement), arguments=arguments,
            )
        )  # fmt: skip
    lines = []
    for item in report["install"]:
        name, version = canonicalize_name(item["metadata"]["name"]), item["metadata"]["version"]
        if name not in defaults:
            lines.append(f"{name}=={version} --hash=sha256:{_digest_of(item['download_info'])}")
    return lines


def _digest_of(download: dict[str, Any]) -> str:
    """Return the SHA-256 of a download in a report of pip; older ones, as on Debian 12, write one hash."""
    found: dict[str, Any] = download["archive_info"]
    hashes = found.get("hashes") or dict([found["hash"].split("=", 1)])
    return str(hashes["sha256"])


def _finish_matplotlib(staging: Path, site: Path) -> None:
    """Add the fonts to those of matplotlib, set its defaults, and write its list of fonts."""
    data = site / "matplotlib" / "mpl-data"
    for name in _FONTS:
        (found,) = site.glob(f"pylopdf_fonts_*/{name}")
        found.rename(data / "fonts" / "ttf" / name)
    for package in site.glob("pylopdf_fonts_*/"):
        if not package.name.endswith(".dist-info"):
            shutil.rmtree(package)
    defaults = data / "matplotlibrc"
    # In this file one `#` before a name is no comment: matplotlib reads its defaults from such lines.
    shipped = re.sub(r"^#?(backend|font\.family)\s*:.*\n", "", defaults.read_text(), flags=re.MULTILINE)
    defaults.write_text(shipped + _MATPLOTLIBRC)
    lists = staging / "matplotlib"
    lists.mkdir()
    with tempfile.TemporaryDirectory() as home:
        done = subprocess.run(  # noqa: S603 - matplotlib of the pinned set
            tied_to_this_process(sys.executable, "-I", "-S", "-c", _LIST_FONTS, str(site), str(lists)),
            env={"HOME": home, "MPLCONFIGDIR": home, "PATH": "/usr/bin:/bin"},
            check=False,
            capture_output=True,
            text=True,
            timeout=_INSTALL_SECONDS,
            start_new_session=True,
        )
    if done.returncode:
        raise PackageInstallError(f"matplotlib cannot list its fonts: {done.stderr.strip()[-500:]}")


def _drop_tests(site: Path) -> None:
    """Remove the packages' own tests, a sixth of their size."""
    for path in sorted(site.rglob("tests")):
        if path.is_dir() and (path / "__init__.py").is_file():
            shutil.rmtree(path)


def _write_manifest(staging: Path, site: Path, added: dict[str, list[str]], digest: str) -> None:
    found: dict[str, str] = {
        canonicalize_name(distribution.name): distribution.version
        for distribution in importlib.metadata.distributions(path=[str(site)])
    }
    names = [line for line in _NAMES.read_text().split() if line in found and not line.startswith("pylopdf")]
    record = {
        "python": python_directory().removeprefix("python"),
        "named": [(name, found[name]) for name in (*names, *sorted(added)) if name != "tzdata"],
        "packages": sorted(found.items()),
        "added": added,
        "digest": digest,
    }
    (staging / MANIFEST).write_text(json.dumps(record, indent=1))


def _open_for_all(top: Path) -> None:
    """Make everything readable and nothing writable for other users, whatever the umask was."""
    for directory, _, names in os.walk(top):
        os.chmod(directory, 0o755)  # noqa: S103 - the code's user reads it
        for name in names:
            os.chmod(os.path.join(directory, name), 0o644)


def _drop_old(root: Path) -> None:
    """Remove versions that were replaced a day ago, which the age of their mark says, and unfinished ones."""
    current = (root / CURRENT).resolve()
    for path in root.iterdir():
        if path == current or path.is_symlink() or not path.is_dir():
            continue
        if not (path / MANIFEST).is_file():  # its build was killed, as this process has the lock
            shutil.rmtree(path, ignore_errors=True)
            continue
        mark = path / "replaced"
        if not mark.exists():
            mark.touch()
        elif time.time() - mark.stat().st_mtime > _KEEP_SECONDS:
            shutil.rmtree(path, ignore_errors=True)


def _digest(added: dict[str, list[str]]) -> str:
    # With this file, because it decides what is made of the wheels.
    recipe = Path(__file__).read_text()
    text = "\n".join((_DEFAULTS.read_text(), recipe, python_directory(), json.dumps(added, sort_keys=True)))
    return hashlib.sha256(text.encode()).hexdigest()


def _default_pins() -> dict[str, str]:
    """Return name and version of the default set for this Python."""
    pins: dict[str, str] = {}
    for line in re.findall(r"^[a-z0-9].*", _DEFAULTS.read_text(), re.MULTILINE):
        pin = Pin(line.rstrip("\\ "))
        if pin.marker is None or pin.marker.evaluate():
            pins[canonicalize_name(pin.name)] = str(pin.specifier).removeprefix("==")
    return pins
