"""Paths that an area refuses, with the path in the error."""

from __future__ import annotations

import pytest

from nekro_agent.errors import InvalidValueError
from storage.files.paths import checked_path, folded_path, parents_of, refuse_collisions


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("", "empty"),
        ("../secret", "'..'"),
        ("a/../../secret", "'..'"),
        ("..", "'..'"),
        ("/etc/passwd", "absolute"),
        ("//etc", "absolute"),
        ("a//b", "empty name"),
        ("a/", "empty name"),
        ("./a", "'.'"),
        ("a/.", "'.'"),
        ("a\0b", "NUL"),
        ("a\udcff", "UTF-8"),
        ("n" * 256, "255 bytes"),
        ("ü" * 128, "255 bytes"),
        ("/".join(["d" * 200] * 21), "4000 bytes"),
        ("/".join("d" * 33), "deeper than 32"),
    ],
)
def test_paths_that_leave_an_area_or_fit_no_file_system_are_refused(path: str, reason: str) -> None:
    with pytest.raises(InvalidValueError, match=reason) as refused:
        checked_path(path)
    assert ascii(path)[:40] in str(refused.value)


@pytest.mark.parametrize("path", ["a", "a/b.txt", "...", "..a", "a..", "ü/日本", "a b\n", "n" * 255])
def test_other_paths_are_accepted(path: str) -> None:
    assert checked_path(path) == path


@pytest.mark.parametrize(
    ("one", "other"),
    [("README", "readme"), ("\u00e9", "e\u0301"), ("stra\u00dfe", "STRASSE"), ("\u0345", "\u03b9")],
)
def test_paths_that_some_file_system_takes_for_one_are_refused(one: str, other: str) -> None:
    assert folded_path(one) == folded_path(other)
    with pytest.raises(InvalidValueError, match="differ only in case") as refused:
        refuse_collisions([one, other])
    assert ascii(one) in str(refused.value) and ascii(other) in str(refused.value)


def test_directories_of_a_path_are_named_from_the_innermost() -> None:
    assert list(parents_of("a/b/c")) == ["a/b", "a"]
    assert list(parents_of("a")) == []
