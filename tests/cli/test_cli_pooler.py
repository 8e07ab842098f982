"""Commands that reach PostgreSQL through pgbouncer in transaction mode."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from nekro_shell import Shell, open_shell
from pgbouncer_process import PgBouncer, needs_pgbouncer

from broker_config.settings import DatabaseSettings

pytestmark = [pytest.mark.extended, needs_pgbouncer]


@pytest.fixture
def shell() -> Iterator[Shell]:
    with open_shell({}) as shell:
        yield shell


@pytest.fixture
def pooler(make_database: Callable[[str], DatabaseSettings]) -> Iterator[PgBouncer]:
    """One server connection; an empty database."""
    url = str(make_database("postgres").url)
    with PgBouncer(url, default_pool_size=1, ignore_startup_parameters="options") as pooler:
        yield pooler


def database_check(shell: Shell, url: str) -> tuple[int, dict[str, Any]]:
    done = shell.inside("doctor", "--json", NEKRO_DATABASE__URL=url)
    return done.code, next(check for check in json.loads(done.out) if check["name"] == "database")


def test_the_schema_is_migrated_and_the_doctor_names_the_mode(shell: Shell, pooler: PgBouncer) -> None:
    url = pooler.url(pool_mode="transaction")
    _, before = database_check(shell, url)
    assert (before["verdict"], before["fix"]) == ("failed", "run `nekro db upgrade`")
    for _ in range(2):
        done = shell.inside("db", "upgrade", NEKRO_DATABASE__URL=url)
        assert done.code == 0, done.err
    _, named = database_check(shell, url)
    assert named["verdict"] == "ok" and ", pool mode transaction, schema " in named["detail"], named
    code, unnamed = database_check(shell, pooler.url())
    assert (code, unnamed["verdict"]) == (4, "failed")
    assert "add the parameter pool_mode=transaction" in unnamed["detail"]


def test_an_unknown_mode_is_an_error_of_usage(shell: Shell) -> None:
    url = "postgresql://u@127.0.0.1/x?pool_mode=statement"
    words = "NEKRO_DATABASE__URL: pool_mode is 'statement'; write pool_mode=session or pool_mode=transaction"
    for command in (["doctor"], ["db", "upgrade"], ["history", "cli"]):
        done = shell.inside(*command, NEKRO_DATABASE__URL=url)
        assert (done.code, words in done.err) == (2, True), done
