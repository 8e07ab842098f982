"""Directories of chats, sandboxes and plugins."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nekro_agent.errors import InvalidValueError, StorageError
from nekro_agent.layout import default_container_key
from nekro_agent.ports import FileAreas
from storage.files.areas import DataAreas


def test_areas_are_at_the_paths_that_plugins_expect(tmp_path: Path) -> None:
    areas: FileAreas = DataAreas(tmp_path)
    assert areas.uploads_dir("chat-1") == tmp_path / "uploads" / "chat-1"
    assert areas.shared_dir("sandbox_1") == tmp_path / "sandboxes" / "sandbox_1"
    assert areas.plugin_dir("author.module") == tmp_path / "plugins" / "author.module"
    assert all(path.is_dir() for path in tmp_path.glob("*/*")) and len(list(tmp_path.glob("*/*"))) == 3


@pytest.mark.extended
@settings(max_examples=60)
@given(keys=st.sets(st.text(min_size=1), min_size=2, max_size=4))
def test_every_chat_has_its_own_directory_below_uploads(tmp_path: Path, keys: set[str]) -> None:
    areas = DataAreas(tmp_path)
    directories = {areas.uploads_dir(key) for key in keys}
    assert len(directories) == len(keys)
    assert {directory.resolve().parent for directory in directories} == {(tmp_path / "uploads").resolve()}


@pytest.mark.parametrize(
    "key", ["", ".", "..", "../x", "a/b", "/etc", "-x", ".hidden", "a\0", "é", "k" * 257]
)
def test_container_key_that_is_no_plain_name_gets_no_directory(tmp_path: Path, key: str) -> None:
    with pytest.raises(InvalidValueError, match="container key"):
        DataAreas(tmp_path).shared_dir(key)
    assert not (tmp_path / "sandboxes").exists()


def test_container_key_of_a_chat_without_a_row_is_accepted(tmp_path: Path) -> None:
    key = default_container_key("onebot_v11-group:1/2")
    assert DataAreas(tmp_path).shared_dir(key).parent == tmp_path / "sandboxes"


def test_data_directory_that_is_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="NEKRO_DATA_DIR"):
        DataAreas(tmp_path / "file").plugin_dir("a.b")
