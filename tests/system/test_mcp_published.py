"""Every tool of published MCP servers, listed with its signature and called by code in a sandbox.

``make mcp-servers`` installs the servers; one that this machine lacks is left out by name.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from waiting import eventually
from worker_fleet import Fleet, build_fleet

from nekro.app import use_cases
from nekro.app.services import Services
from nekro.sandbox.models import StopType

sys.path.insert(0, str(Path(__file__).parents[1] / "connectors"))
from test_mcp_servers import node_server, pages, python_server

from nekro.extensions.mcp.rows import ServerRows

__all__ = ["pages"]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

#: Expressions of the sandbox, and patterns of their values; ``error: …`` is a ``MethodError``.
Calls = list[tuple[str, str]]
TIME: Calls = [
    ("get_current_time('Europe/Berlin')", "Europe/Berlin"),
    ("convert_time('UTC', '12:00', 'Asia/Tokyo')", "21:00"),
    ("get_current_time('Nowhere/Town')", "error: .*Nowhere"),
]
GIT: Calls = [
    ("git_status(DIR)", "new.txt"),
    ("git_log(DIR, max_count=1)", "The first"),
    ("git_show(DIR, 'HEAD')", "The first"),
    ("git_create_branch(DIR, 'other')", "other"),
    ("git_checkout(DIR, 'other')", "other"),
    ("git_branch(DIR, 'local')", "other"),
    ("git_diff_unstaged(DIR)", ""),
    ("git_add(DIR, files=['new.txt'])", "staged"),
    ("git_diff_staged(DIR)", "a new file"),
    ("git_reset(DIR)", "reset"),
    ("git_add(DIR, ['new.txt'])", "staged"),
    ("git_commit(DIR, 'The second')", "committed"),
    ("git_diff(DIR, 'HEAD~1')", "a new file"),
    ("git_add(DIR, files=['no-such-file'])", "error: .*"),
]
FETCH: Calls = [("fetch(URL, raw=True)", "A page of the tests"), ("fetch(URL + '.missing')", "error: .*")]
SQLITE: Calls = [
    ("create_table('CREATE TABLE t (a INTEGER)')", "created"),
    ("write_query('INSERT INTO t VALUES (42)')", "1"),
    ("read_query('SELECT a FROM t')", "42"),
    ("list_tables()", "'t'"),
    ("describe_table('t')", "INTEGER"),
    ("append_insight('many')", "added"),
    ("read_query('SELECT b FROM none')", "(?i)error"),
    ("read_query(1)", "error: .*"),
]
EVERYTHING: Calls = [
    ("echo('hi')", "Echo: hi"),
    ("get_annotated_message('success', includeImage=True)", "/app/uploads/"),
    ("get_env()", "HOME"),
    ("get_resource_links(count=2)", "demo://"),
    ("get_resource_reference(resourceType='Blob', resourceId=1)", "/app/uploads/"),
    ("get_structured_content('Chicago')", "temperature"),
    ("get_sum(2, 3)", "5"),
    ("get_tiny_image()", r"/app/uploads/every-.*\.png"),
    # Without a network it cannot get the file.
    ("gzip_file_as_resource()", "error: .*"),
    ("toggle_simulated_logging()", "logging"),
    ("toggle_subscriber_updates()", "updates"),
    ("trigger_long_running_operation(duration=0.2, steps=2)", "completed"),
    # It can be called as a task of the protocol only.
    ("simulate_research_query('tests')", "error: .*task augmentation"),
    ("trigger_elicitation_request()", ""),
    ("trigger_url_elicitation('https://example.org/x')", ""),
    # No model is configured here.
    ("trigger_sampling_request('Say yes.')", "error: .*unknown group of models"),
    ("get_sum('x', 'y')", "error: .*"),
]
FILES: Calls = [
    ("write_file(DIR + '/a.txt', 'written')", "wrote"),
    ("read_text_file(DIR + '/a.txt')", "written"),
    ("read_file(DIR + '/a.txt', head=1)", "written"),
    ("read_multiple_files([DIR + '/a.txt'])", "written"),
    ("edit_file(DIR + '/a.txt', [{'oldText': 'written', 'newText': 'changed'}])", "changed"),
    ("create_directory(DIR + '/b')", "created"),
    ("move_file(DIR + '/a.txt', DIR + '/b/a.txt')", "moved"),
    ("list_directory(DIR)", r"\[DIR\] b"),
    ("list_directory_with_sizes(DIR, sortBy='size')", "b"),
    ("directory_tree(DIR)", "a.txt"),
    ("search_files(DIR, '**/a.txt')", "a.txt"),
    ("get_file_info(DIR + '/b/a.txt')", "size"),
    ("list_allowed_directories()", "shared"),
    ("read_media_file(DIR + '/picture.png')", "image/png"),
    ("read_text_file('/etc/shadow')", "error: .*"),
]


@pytest.fixture(scope="module")
def fleet(redis_server: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """A worker without servers."""
    directory = tmp_path_factory.mktemp("published")
    fleet = build_fleet(directory, redis_server.url, f"sqlite:///{directory / 'nekro.db'}")
    fleet.start("methods")
    yield fleet
    fleet.stop()


def git_entry(directory: Path, _: str) -> dict[str, Any]:
    for arguments in (("init", "-q"), ("-c", "user.name=A", "-c", "user.email=a@b", *_commit("The first"))):
        subprocess.run(["git", *arguments], cwd=directory, check=True)
    (directory / "new.txt").write_text("a new file\n")
    subprocess.run(["chmod", "-R", "a+rwX", str(directory)], check=True)
    entry = python_server("mcp-server-git", "--repository", str(directory), files={str(directory): "rw"})
    who = {
        f"GIT_{role}_{what}": "a@example.org"
        for role in ("AUTHOR", "COMMITTER")
        for what in ("NAME", "EMAIL")
    }
    safe = {"GIT_CONFIG_COUNT": "1", "GIT_CONFIG_KEY_0": "safe.directory", "GIT_CONFIG_VALUE_0": "*"}
    return {**entry, "env": who | safe}


def _commit(text: str) -> tuple[str, ...]:
    return ("commit", "-q", "--allow-empty", "-m", text)


def files_entry(directory: Path, _: str) -> dict[str, Any]:
    (directory / "picture.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    return node_server("server-filesystem", str(directory), files={str(directory): "rw"})


Entry = Callable[[Path, str], dict[str, Any]]
SERVERS: dict[str, tuple[Entry, Calls]] = {
    "time": (lambda *_: python_server("mcp-server-time", "--local-timezone", "UTC"), TIME),
    "git": (git_entry, GIT),
    "fetch": (lambda *_: python_server("mcp-server-fetch", "--allow-private-ips", network=True), FETCH),
    "sqlite": (
        lambda *_: python_server(
            "mcp-server-sqlite", "--db-path", "/home/program/a.db", of="servers-of-2025"
        ),
        SQLITE,
    ),
    "every": (
        lambda *_: node_server("server-everything", sampling={}, elicitation_seconds=1),
        EVERYTHING,
    ),
    "files": (files_entry, FILES),
}


@pytest.mark.parametrize("name", SERVERS)
async def test_sandboxed_code_calls_every_tool(
    fleet: Fleet, services: Services, tmp_path: Path, pages: str, name: str
) -> None:
    make_entry, calls = SERVERS[name]
    shared = tmp_path / "shared"
    shared.mkdir(mode=0o777)
    shared.chmod(0o777)
    entry = make_entry(shared, pages)
    entry["nekro"] = {**entry["nekro"], "approval": False}
    async with services.database.autocommit() as transaction:
        await ServerRows(transaction.connection).put(name, entry, is_enabled=True)

    async def listed() -> dict[str, str]:
        await services.read_catalogue()
        return {one.name: one.signature for one in services.registry if one.plugin_key == f"mcp.{name}"}

    found = await eventually(listed, what=fleet.waiting_for(f"the tools of {name}"))
    assert set(found) == {expression.partition("(")[0] for expression, _ in calls}, json.dumps(
        found, indent=1
    )
    code = f"DIR, URL = {str(shared)!r}, {pages + '/page.html'!r}\n"
    for number, (expression, _) in enumerate(calls):
        code += (
            f"try:\n    print({number}, ascii(mcp.{name}.{expression})[:2000])\n"
            f"except MethodError as exc:\n    print({number}, 'error:', ascii(str(exc))[:2000])\n"
        )
    report = await use_cases.run_code(
        services, code, chat_key="published", user_id=None, follow_up=False, file_name="t"
    )
    assert report.stop_type is StopType.NORMAL, report
    said = dict(line.split(" ", 1) for line in report.output.splitlines() if re.match(r"\d+ ", line))
    for number, (expression, expected) in enumerate(calls):
        assert re.search(expected, said[str(number)]), f"{expression}: {said[str(number)]}"
        assert said[str(number)].startswith("error:") == expected.startswith("error:"), expression
