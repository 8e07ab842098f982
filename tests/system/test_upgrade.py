"""Two versions on one broker and one database: this one beside release 0.2.0, and beside a next version."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from waiting import WAIT_SECONDS
from worker_fleet import Fleet, Worker, main_module

from broker_config.settings import Settings
from nekro.app import use_cases
from nekro.cli.running import ExitCode
from nekro_agent.placeholders import OWN_PACKAGES
from storage.migrate import check, known_revisions, upgrade

ROOT = Path(__file__).parents[2]
#: Release 0.2.0, the oldest whose databases are migrated.
BEFORE = os.environ.get("NEKRO_TEST_COMMIT_BEFORE", "80e8ba2f")
PACKAGES = (*OWN_PACKAGES, "plugin_pkgs")
#: Permitted changes of a next version: a revision that only adds, and fields with defaults.
NEXT_REVISION = """
import sqlalchemy as sa
from alembic import op

revision, down_revision, branch_labels, depends_on = "9999", "{head}", None, None


def upgrade() -> None:
    op.add_column("calls", sa.Column("colour", sa.Text(), nullable=True))
    op.add_column("messages", sa.Column("weight", sa.Integer(), nullable=False, server_default="1"))
    op.create_table("colours", sa.Column("name", sa.Text(), primary_key=True))
    op.create_index("ix_calls_colour", "calls", ["colour"])
"""
NEXT_FIELD = """
    colour: str | None = Field("red", description="What the version before knows nothing of.")
"""


@pytest.fixture(scope="module")
def database_url(postgres_server: Any) -> str:
    """Settings of a fleet."""
    url: str = postgres_server.create_database()
    return url


@pytest.fixture(scope="module")
def older_tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The code of an earlier commit."""
    tree = tmp_path_factory.mktemp("before")
    packed = subprocess.run(["git", "archive", BEFORE], cwd=ROOT, capture_output=True, check=False)
    if packed.returncode:
        pytest.skip(f"no history to take commit {BEFORE} from: {packed.stderr.decode().strip()}")
    subprocess.run(["tar", "-x", "-C", tree], input=packed.stdout, check=True)
    return tree


def copied(tree: Path) -> Path:
    """Copy this code into a directory."""
    for package in PACKAGES:
        shutil.copytree(ROOT / package, tree / package, ignore=shutil.ignore_patterns("__pycache__"))
    return tree


@pytest.fixture(scope="module")
def foreign_tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """This code with a message form of two releases later: neither side can read the other's."""
    tree = copied(tmp_path_factory.mktemp("foreign"))
    wire = tree / "nekro/wire/invocation.py"
    text, count = re.subn(r"range\(2, 3\)", "range(3, 4)", wire.read_text())
    assert count == 1
    wire.write_text(text.replace("WIRE_VERSION: Final = 2", "WIRE_VERSION: Final = 3"))
    return tree


@pytest.fixture(scope="module")
def next_tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """This code with permitted additions: a revision, and fields of messages and results."""
    tree = copied(tmp_path_factory.mktemp("next"))
    revision = NEXT_REVISION.format(head=known_revisions()[-1])
    (tree / "storage/migrations/versions/9999_next.py").write_text(revision)
    wire = tree / "nekro/wire/invocation.py"
    text, count = re.subn(r"(    version: int = Field.*\n)", rf"\1{NEXT_FIELD}", wire.read_text())
    assert count == 2, "invocation and envelope"
    wire.write_text(text)
    return tree


def environment_of_tree(settings: Settings, tree: Path) -> dict[str, str]:
    """Environment of any version, with the code of a tree before ours."""
    key = settings.security.signing_key
    assert settings.broker.url and settings.database.url and key is not None
    return {name: value for name, value in os.environ.items() if not name.startswith("NEKRO_")} | {
        "PYTHONPATH": str(tree),
        "NEKRO_BROKER__URL": settings.broker.url,
        "NEKRO_BROKER__KEY_PREFIX": settings.broker.key_prefix,
        "NEKRO_DATABASE__URL": settings.database.url,
        "NEKRO_DATA_DIR": str(settings.data_dir),
        "NEKRO_PLUGINS__DIRS": ",".join(map(str, settings.plugins.dirs)),
        "NEKRO_SECURITY__SIGNING_KEY": key.get_secret_value(),
        "NEKRO_WORKERS__DRAIN_SECONDS": "10",
    }


def nekro_of(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command of another version to its end."""
    return subprocess.run(
        [sys.executable, "-P", "-m", main_module(environment), *arguments],
        env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
        timeout=WAIT_SECONDS,
    )  # fmt: skip


def start_of(fleet: Fleet, environment: dict[str, str], lane: str, *, log: Path) -> Worker:
    """Start a worker of another version."""
    worker = Worker(fleet.settings, log, lane=lane, concurrency=None, environment=environment)
    fleet.workers.append(worker)
    worker.wait_ready()
    return worker


async def call_until_each_answered(fleet: Fleet, workers: list[Worker]) -> None:
    """Call methods of each type until each worker has run some; every call must succeed."""
    services = fleet.services()
    await services.start()
    pids: set[int] = set()
    try:
        async with asyncio.timeout(WAIT_SECONDS):
            while not {worker.pid for worker in workers} <= pids:
                envelopes = await asyncio.gather(
                    *(
                        use_cases.invoke(
                            services, method, (argument,), {}, chat_key="c", user_id="u", timeout_seconds=30
                        )
                        for method, argument in [("journal", 1), ("remember", "x"), ("look_up", "y")] * 4
                    )
                )
                pids |= {int(envelope.worker.rpartition(":")[2]) for envelope in envelopes}
    finally:
        await services.close()


@pytest.mark.slow
@pytest.mark.timeout(240)
async def test_release_0_2_0_and_this_version_answer_each_other_before_and_after_the_migration(
    make_fleet: Callable[..., Fleet], older_tree: Path, tmp_path: Path
) -> None:
    fleet = await asyncio.to_thread(make_fleet, is_migrated=False)
    environment = environment_of_tree(fleet.settings, older_tree)

    async def theirs(*arguments: str) -> None:
        done = await asyncio.to_thread(nekro_of, environment, *arguments)
        assert done.returncode == 0, done.stderr

    await theirs("db", "upgrade")
    older = await asyncio.to_thread(
        start_of, fleet, environment, "methods", log=tmp_path / "methods-before.log"
    )
    await theirs("call", "journal", "--args", "[0]", "--json")

    await upgrade(fleet.settings.database, fleet.settings.data_dir)  # while the worker runs
    status = await check(fleet.settings.database, fleet.settings.data_dir)
    assert status.revision == known_revisions()[-1]
    await theirs("call", "remember", "--args", '["z"]')
    ours = await asyncio.to_thread(fleet.run, "call", "journal", "--args", "[1]")
    assert ours.returncode == 0, ours.stderr
    (newer,) = await asyncio.to_thread(fleet.start, "methods")
    await call_until_each_answered(fleet, [older, newer])
    assert await asyncio.to_thread(older.stop) == 0
    for method, argument in (("journal", "[2]"), ("remember", '["z"]'), ("look_up", '["y"]')):
        await theirs("call", method, "--args", argument)


@pytest.mark.slow
@pytest.mark.timeout(240)
async def test_workers_continue_while_a_next_version_migrates_and_starts(
    make_fleet: Callable[..., Fleet], next_tree: Path, tmp_path: Path, postgres_server: Any
) -> None:
    fleet = await asyncio.to_thread(make_fleet, database={"url": postgres_server.create_database()})
    environment = environment_of_tree(fleet.settings, next_tree)
    (ours,) = await asyncio.to_thread(fleet.start, "methods")
    done = await asyncio.to_thread(nekro_of, environment, "db", "upgrade")
    assert done.returncode == 0, done.stderr
    status = await check(fleet.settings.database, fleet.settings.data_dir)
    assert status.revision == "9999"
    theirs = await asyncio.to_thread(start_of, fleet, environment, "methods", log=tmp_path / "next.log")
    await call_until_each_answered(fleet, [ours, theirs])
    assert await asyncio.to_thread(ours.stop) == 0
    (restarted,) = await asyncio.to_thread(fleet.start, "methods")
    await call_until_each_answered(fleet, [restarted, theirs])
    assert await asyncio.to_thread(theirs.stop) == 0
    last = await asyncio.to_thread(nekro_of, environment, "call", "remember", "--args", '["z"]', "--json")
    assert last.returncode == 0, last.stderr
    listed = await asyncio.to_thread(fleet.run, "history", "cli")
    assert listed.returncode == 0, "the older version's commands work on the newer schema"


@pytest.mark.slow
@pytest.mark.timeout(120)
async def test_a_caller_gets_an_error_when_versions_cannot_read_each_other(
    make_fleet: Callable[..., Fleet], foreign_tree: Path, tmp_path: Path, postgres_server: Any
) -> None:
    fleet = await asyncio.to_thread(make_fleet, database={"url": postgres_server.create_database()})
    environment = environment_of_tree(fleet.settings, foreign_tree)
    (ours,) = await asyncio.to_thread(fleet.start, "methods")
    for method in ("journal", "remember"):
        newer = await asyncio.to_thread(nekro_of, environment, "call", method, "--args", "[1]")
        assert newer.returncode == ExitCode.BROKER
        assert "version 3, nekro-workers" in newer.stderr and "2; upgrade this worker" in newer.stderr
    assert await asyncio.to_thread(ours.stop) == 0
    await asyncio.to_thread(start_of, fleet, environment, "methods", log=tmp_path / "foreign.log")
    older = await asyncio.to_thread(fleet.run, "call", "journal", "--args", "[1]")
    assert older.returncode == ExitCode.BROKER
    assert "version 2, nekro-workers" in older.stderr and "upgrade its sender" in older.stderr
