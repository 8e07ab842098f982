"""Refuses paths of the host that would show its secrets to a program."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from nekro_agent.errors import InvalidValueError

__all__ = ["refuse_secret_path"]


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
