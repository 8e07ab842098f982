"""The security page names existing tests, and every attack of the list has one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from broker_config.settings import SandboxSettings
from nekro.sandbox.limits.enforcement import process_limits
from nekro.sandbox.models import Limit, StopType

REPOSITORY = Path(__file__).parents[2]
#: Attacks on the broker and the worker, whose tests have other names.
ELSEWHERE = {
    "R17": ("tests/chaos/test_chaos_messages.py", "test_31_forged_and_broken_messages_run_nothing"),
    "R18": ("tests/chaos/test_chaos_messages.py", "application/x-python-serialize"),
    "R19": ("tests/system/test_calls.py", "test_a_secret_in_an_error_stays_on_the_host"),
}
ALL = (
    *(f"R{number}" for number in range(1, 23)),
    *(f"S{number}" for number in range(1, 6)),
    *(f"F{number}" for number in range(1, 14)),
    *(f"N{number}" for number in range(1, 11)),
    *(f"K{number}" for number in range(1, 29)),
    *(f"L{number}" for number in range(1, 19)),
    *(f"U{number}" for number in range(1, 9)),
)


@pytest.fixture(scope="module")
def tested() -> set[str]:
    """Attack ids in the names of tests, including those that share a test."""
    found: set[str] = set()
    for path in REPOSITORY.glob("tests/**/test_*.py"):
        for name in re.findall(r"def test_attack_((?:[A-Z]\d+_)+)", path.read_text()):
            found.update(name.strip("_").split("_"))
    return found


def ids_of(text: str) -> set[str]:
    """Ids such as R3 and ranges such as R5–R9."""
    found: set[str] = set()
    for letter, first, last in re.findall(r"\b([RSFNKLU])(\d+)(?:–[RSFNKLU](\d+))?\b", text):
        found.update(f"{letter}{number}" for number in range(int(first), int(last or first) + 1))
    return found


def test_every_attack_of_the_list_has_a_test(tested: set[str]) -> None:
    assert set(ALL) - tested - ELSEWHERE.keys() == set()
    for path, words in ELSEWHERE.values():
        assert words in (REPOSITORY / path).read_text(), words


def test_security_page_names_existing_tests(tested: set[str]) -> None:
    text = (REPOSITORY / "docs" / "security.md").read_text()
    assert ids_of(text) - tested - ELSEWHERE.keys() == set()
    assert set(ALL) - ids_of(text) == set()
    for path in re.findall(r"`(tests/[\w/.]+)`", text):
        assert (REPOSITORY / path).exists(), path


def test_every_limit_is_on_the_page() -> None:
    text = (REPOSITORY / "docs" / "security.md").read_text()
    for limit in Limit:
        assert f"`{limit}`" in text, limit


def test_every_limit_ends_an_attack_and_is_named_in_its_result() -> None:
    attacks = "".join(path.read_text() for path in Path(__file__).parent.glob("test_sandbox_attacks_*.py"))
    for limit in Limit:
        assert (
            f"Limit.{limit.name})" in attacks or f'"{limit}")' in attacks or f"Limit.{limit.name}," in attacks
        ), limit


def test_default_limits_are_those_of_the_page_and_of_the_design() -> None:
    settings = SandboxSettings()
    mebi = 1 << 20
    assert {
        "wall_seconds": 60, "cpu_seconds": 30, "memory_bytes": 512 * mebi,
        "max_processes": 64, "max_file_bytes": 32 * mebi, "tmp_bytes": 64 * mebi,
        "shared_bytes": 256 * mebi, "shared_files": 2000, "output_keep_bytes": mebi >> 4,
        "argument_bytes": mebi, "return_bytes": 8 * mebi, "max_calls": 200, "max_calls_in_flight": 8,
        "max_concurrent": 4,
    }.items() <= settings.model_dump().items()  # fmt: skip
    assert process_limits(settings) == {
        "AS": 1 << 30, "CORE": 1, "CPU": 30, "FSIZE": 32 * mebi, "MEMLOCK": 0, "MSGQUEUE": 0, "NOFILE": 256,
        "NPROC": 64,
    }  # fmt: skip


def test_stop_types_have_the_numbers_of_the_reference() -> None:
    own = {"APPROVAL": 14, "DIVERGED": 15, "WAITING": 16}
    assert {stop.name: stop.value for stop in StopType} == own | {
        "NORMAL": 0, "ERROR": 1, "TIMEOUT": 2, "AGENT": 8, "MANUAL": 9, "SECURITY": 10,
        "MULTIMODAL_AGENT": 11,
    }  # fmt: skip
