"""Secrets of an installation, where a host keeps them, and paths that would show them to a program.

They are files of the data directory that only its user can read: ``secrets/signing.key`` signs messages;
``secrets/api.key`` is the key of the HTTP API for this user; ``secrets/monitoring.key`` is the password of
Flower and the token of metrics on loopback. No program that an operator declares may see ``secret_paths``.
"""

from __future__ import annotations

import os
import re
import secrets
import stat
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final

from broker_config.setting_sources import FILE_SUFFIX
from broker_config.settings import ENV_PREFIX, TEST_PREFIX, Settings
from nekro_agent.errors import InvalidValueError, SettingsError
from nekro_agent.files.private_files import make_directory, restrict

__all__ = [
    "monitoring_key",
    "refuse_secret_path",
    "secret_path",
    "secret_paths",
    "secret_text",
]

_OTHERS: Final = 0o077

_MOST_BYTES: Final = 4096


def secret_path(data_dir: Path, name: str) -> Path:
    """Return the path of a secret."""
    return data_dir / "secrets" / name


def secret_text(path: Path, make: Callable[[], str]) -> str:
    """Return the text of a secret's file, which ``make`` provides if there is none.

    Processes that create it at the same time agree on one text.

    Raises:
        SettingsError: another user can read or change the file, or it cannot be read.
    """
    try:
        make_directory(path.parent)
        restrict(path.parent, 0o700)
        _require_own(path.parent, os.lstat(path.parent), data_dir=path.parent.parent)
        if not os.path.lexists(path):
            _create(path, make())
        return _read(path)
    except OSError as exc:
        raise SettingsError(
            f"{path}: {exc.strerror}; set NEKRO_DATA_DIR to a directory of this user"
        ) from exc
    except UnicodeDecodeError:
        raise SettingsError(f"{path} contains no secret; delete it, and a new one is made") from None


def monitoring_key(data_dir: Path) -> tuple[Path, str]:
    """Return the file and the text of the key for metrics and Flower on loopback; at first use it is made.

    Raises:
        SettingsError: as from ``secret_text``.
    """
    path = secret_path(data_dir, "monitoring.key")
    return path, secret_text(path, lambda: secrets.token_urlsafe(32))


def _read(path: Path) -> str:
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:
        info = os.fstat(descriptor)
        if not stat.S_ISREG(info.st_mode):
            raise SettingsError(f"{path} is not a file; delete it, and a new one is made")
        _require_own(path, info, data_dir=path.parent.parent)
        return file.read(_MOST_BYTES).decode("ascii").strip()


def _require_own(path: Path, info: os.stat_result, *, data_dir: Path) -> None:
    """Return if only this user, or root, controls a file or directory of secrets."""
    owners = {0, os.geteuid()}
    if os.geteuid() == 0:
        owners.add(data_dir.stat().st_uid)  # root works on a data directory of an ordinary user
    if info.st_uid not in owners:
        raise SettingsError(
            f"{path} belongs to user {info.st_uid}, not to user {os.geteuid()} who runs this; "
            "run it as that user, or set NEKRO_DATA_DIR"
        )
    if info.st_mode & _OTHERS:
        right = "700" if stat.S_ISDIR(info.st_mode) else "600"
        raise SettingsError(f"{path} can be read by others; run `chmod {right} {path}`")


def _create(path: Path, text: str) -> None:
    """Write the text to a temporary file and link it, so that concurrent processes agree on one text."""
    descriptor, temporary = tempfile.mkstemp(dir=path.parent)  # mkstemp creates it with mode 0600
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(text + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.link(temporary, path)
    except FileExistsError:
        pass  # the other process was first
    finally:
        os.unlink(temporary)


_MCP_FILE: Final = "NEKRO_MCP__FILE"

_SQLITE: Final = re.compile(r"sqlite(?:\+\w+)?:///(?:file:)?([^?#]+)")

_SQLITE_SUFFIXES: Final = ("", "-journal", "-shm", "-wal")


def secret_paths(settings: Settings) -> dict[Path, str]:
    """Return files and directories with secrets, each with what it is.

    Of a file that a setting names, it is the directory: other secrets are beside it, and the name may be a
    link to one of them.
    """
    found = {
        Path("/proc"): "/proc, which shows the variables of workers",
        settings.data_dir.absolute(): "the data directory",
    }
    for name, path in (*_named_by_variables(), *_named_by_settings(settings)):
        found.setdefault(_beside(path.absolute()), f"the directory of the file that {name} names")
    if settings.mcp.file is not None:
        found[settings.mcp.file.absolute()] = f"the file that {_MCP_FILE} names"
    own = Path(".env").absolute()
    if own.is_file():
        found[own] = "the .env of workers"
    if database := _SQLITE.match(settings.database.url or ""):
        path = Path(database[1]).expanduser().absolute()
        found |= {path.with_name(path.name + end): "the database" for end in _SQLITE_SUFFIXES}
    return found


def _named_by_variables() -> Iterator[tuple[str, Path]]:
    for name, value in os.environ.items():
        upper = name.upper()
        is_ours = upper.startswith(ENV_PREFIX) and not upper.startswith(TEST_PREFIX)
        if is_ours and upper.endswith(FILE_SUFFIX) and upper != _MCP_FILE and value:
            yield upper, Path(value)


def _named_by_settings(settings: Settings) -> Iterator[tuple[str, Path]]:
    for name in ("tls_ca_file", "tls_cert_file", "tls_key_file"):
        path = getattr(settings.broker, name)
        if path is not None:
            yield f"{ENV_PREFIX}BROKER__{name.upper()}", path


def _beside(file: Path) -> Path:
    """Return the directory of a file; the file itself if that is the root."""
    return file if file.parent == Path("/") else file.parent


def refuse_secret_path(path: Path, secrets: Mapping[Path, str], *, target: Path | None = None) -> None:
    """Return unless a path is one of the secrets, contains one or lies in one, by its name or over links.

    Args:
        path: absolute.
        secrets: files and directories, with what each of them is.
        target: where the path leads; None: what its links say now.

    Raises:
        InvalidValueError: it is, does or lies so; the message names the path and what the secret is.
    """
    shown = {path, _resolved(path) if target is None else target}
    for secret, what in secrets.items():
        for place in {secret, _resolved(secret)}:
            for one in shown:
                if how := next(_relations(one, place), None):
                    raise InvalidValueError(f"the path {path} is refused: it {how} {what}")


def _relations(path: Path, secret: Path) -> Iterator[str]:
    if path == secret:
        yield "is"
    if path in secret.parents:
        yield "contains"
    if secret in path.parents:
        yield "lies in"


def _resolved(path: Path) -> Path:
    try:
        return path.resolve()
    except (OSError, RuntimeError):  # a loop of links
        return path
