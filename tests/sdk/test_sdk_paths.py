"""Sandbox paths, host paths and names."""

from __future__ import annotations

import string
from pathlib import Path, PurePosixPath

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nekro_agent import layout
from nekro_agent.errors import InvalidValueError
from nekro_agent.files.areas import safe_basename
from nekro_agent.testing import InMemoryRuntime
from nekro_agent.tools import path_convertor as paths

CHAT = "onebot_v11-group_1"
plain = st.text(string.ascii_letters + string.digits + "_-.", min_size=1, max_size=40)
segments = st.text(
    st.characters(blacklist_characters="/\0", blacklist_categories=("Cs",)), min_size=1, max_size=20
).filter(lambda name: name not in (".", ".."))


@given(st.lists(st.text(max_size=80).filter(bool), min_size=2, max_size=2, unique=True))
def test_different_keys_never_share_a_directory(keys: list[str]) -> None:
    try:
        first, second = map(layout.encode_key, keys)
    except InvalidValueError:
        return  # a lone surrogate
    assert first != second
    for name in (first, second):
        assert "/" not in name and name not in (".", "..") and len(name.encode()) <= 255


@given(plain.filter(lambda key: set(key) != {"."}))
def test_plain_keys_name_their_directory(key: str) -> None:
    assert layout.encode_key(key) == key


def test_hostile_keys_stay_inside_the_area() -> None:
    for key in ("../../etc", "a/b", "..", ".", "a\0b", "猫", "x" * 500, "C:\\x"):
        name = layout.encode_key(key)
        assert "/" not in name and "\0" not in name and name not in (".", "..")
        assert (Path("/data") / name).parent == Path("/data")
    with pytest.raises(InvalidValueError, match="is empty"):
        layout.encode_key("")


def test_the_documents_examples_map_as_written(world: InMemoryRuntime) -> None:
    data = world.runtime.data_dir
    assert (
        paths.convert_to_host_path(Path("/app/uploads/file.txt"), CHAT)
        == data / "uploads" / CHAT / "file.txt"
    )
    assert (
        paths.convert_to_host_path(Path("/app/shared/output/result.txt"), CHAT, "my_container_id")
        == data / "sandboxes/my_container_id/output/result.txt"
    )
    assert (
        paths.convert_filename_to_access_path("a/report.txt", CHAT) == data / "uploads" / CHAT / "report.txt"
    )
    assert paths.convert_filename_to_container_path("report.txt") == Path("/app/uploads/report.txt")
    assert paths.convert_to_container_path(Path("/data/uploads/some_chat_key/report.txt")) == Path(
        "/app/uploads/report.txt"
    )
    assert paths.get_sandbox_path(Path("x/report.txt")) == Path("/app/uploads/report.txt")
    assert paths.convert_filename_to_sandbox_shared_path("a/b") == Path("/app/shared/b")
    assert paths.convert_filepath_to_sandbox_upload_path("a/b") == Path("/app/uploads/a/b")
    assert paths.convert_filepath_to_sandbox_shared_path("/a/b") == Path("/app/shared/a/b")
    assert [paths.is_url_path(p) for p in ("http://x", "https://x", "HTTP://x", "httpx://", "/a")] == [
        True, True, False, False, False,
    ]  # fmt: skip


@given(st.sampled_from(["uploads", "shared"]), st.lists(segments, min_size=1, max_size=5))
def test_mapping_keeps_the_path_below_the_area(area: str, parts: list[str]) -> None:
    relative = PurePosixPath(*parts)
    for spelling in (f"/app/{area}/{relative}", f"{area}/{relative}", f"./{area}/{relative}"):
        location, below = paths.locate(spelling)
        assert (location.value, below) == (area, relative)
    if parts[0] not in ("uploads", "shared"):
        assert paths.locate(relative) == paths.locate(f"./{relative}") == paths.locate(f"shared/{relative}")
    host = paths.convert_to_host_path(
        Path(f"/app/{area}/{relative}"), CHAT, "box", uploads_dir=Path("/u"), shared_dir=Path("/s")
    )
    assert host == (Path("/u") / CHAT if area == "uploads" else Path("/s/box")) / relative


@pytest.mark.parametrize(
    "bad",
    [
        "/etc/shared/passwd", "/etc/passwd", "/app/other/x", "/app", "/app/uploads2/x", ".", "",
        "/app/uploads/../x", "/app/shared/../../etc/passwd", "../app/uploads/x", "/app/uploads/a\0b",
        "/data/uploads/chat/x", "//etc/passwd",
    ],
)  # fmt: skip
def test_paths_outside_both_areas_are_refused(bad: str) -> None:
    with pytest.raises(ValueError):
        paths.convert_to_host_path(Path(bad) if "\0" not in bad else bad, CHAT, "box")


def test_a_shared_path_needs_a_container_key() -> None:
    with pytest.raises(ValueError, match=r"container_key=_ctx\.container_key"):
        paths.convert_to_host_path(Path("/app/shared/x"), CHAT)


def test_a_link_in_the_path_is_refused(world: InMemoryRuntime, tmp_path: Path) -> None:
    shared = world.areas.shared_dir("box")
    (shared / "out").symlink_to("/etc")
    (shared / "leaf").symlink_to("/etc/passwd")
    for path in ("/app/shared/out/passwd", "/app/shared/leaf"):
        with pytest.raises(ValueError, match="link"):
            paths.convert_to_host_path(Path(path), CHAT, "box")


@given(st.text(max_size=400))
def test_a_reduced_name_is_one_usable_component(name: str) -> None:
    try:
        base = safe_basename(name)
    except InvalidValueError:
        return
    assert base not in ("", ".", "..") and not set(base) & set("/\\\0\n")
    assert len(base.encode()) <= 255 and base.isprintable()
    assert safe_basename(base) == base or len(base.encode()) > 250


@pytest.mark.parametrize(
    ("name", "base"),
    [
        ("../../evil.txt", "evil.txt"), ("C:\\temp\\a.png", "a.png"), ("a\nb.txt", "ab.txt"),
        (" 报告.pdf ", "报告.pdf"), ("x" * 300 + ".tar.gz", "x" * 252 + ".gz"),
    ],
)  # fmt: skip
def test_names_are_reduced_to_their_last_component(name: str, base: str) -> None:
    assert safe_basename(name) == base


@pytest.mark.parametrize("name", ["", ".", "..", "a/", "/", "\n", "..\\.."])
def test_names_without_a_last_component_are_refused(name: str) -> None:
    with pytest.raises(InvalidValueError, match="no usable file name"):
        safe_basename(name)
