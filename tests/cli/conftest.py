"""Fixtures of the command tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from forked_process import ForkedCommand
from nekro_shell import Shell, running_up


@pytest.fixture(scope="module")
def up(shell: Shell) -> Iterator[ForkedCommand]:
    """``nekro up`` with the settings of the module's shell."""
    with running_up(shell) as process:
        yield process


@pytest.fixture
def no_settings_of_the_developer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Commands read ``.env`` of the working directory and ``NEKRO_`` variables: provide neither."""
    monkeypatch.chdir(tmp_path)
    for name in ("NEKRO_BROKER__URL", "NEKRO_DATABASE__URL", "NEKRO_DATA_DIR", "NEKRO_PLUGINS__DIRS"):
        monkeypatch.delenv(name, raising=False)
