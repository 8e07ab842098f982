"""Every time that is fixed in the product states beside its value what it is for."""

from __future__ import annotations

from time_constants import time_constants


def test_every_time_constant_has_a_reason() -> None:
    found = list(time_constants())
    assert len(found) > 10
    assert [one.name for one in found if not one.before.startswith("#")] == []
