"""Servers with a command: confined, restarted, and whatever they send."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from mcp_world import World, odd_entry, opened
from waiting import WAIT_SECONDS, eventually

from broker_config.settings import McpSettings, PluginSettings, Settings
from nekro.extensions.mcp.client.faults import ServerFault
from nekro.extensions.mcp.client.stdio import LineSplitter, TooLong
from nekro.plugins.hooks import PluginHost
from nekro.sandbox import programs
from nekro.sandbox.drivers import isolated
from nekro.sandbox.drivers.isolated import find_tools
from nekro.sandbox.leftovers import own_id
from nekro.sandbox.programs import ProgramSpec, ProgramStarter
from nekro_agent.errors import (
    CallTimeoutError,
    InvalidValueError,
    MethodFailedError,
    OutcomeUnknownError,
    SandboxUnavailableError,
)
from nekro_agent.methods import describe_signature

pytestmark = pytest.mark.usefixtures("sandbox_tools")


@pytest.fixture(scope="module")
def sandbox_tools() -> None:
    """Skip where bubblewrap is missing."""
    try:
        find_tools(None, root_mode=os.geteuid() == 0)
    except Exception as exc:
        pytest.skip(str(exc))


def limited(settings: Settings, **mcp: Any) -> Settings:
    return settings.model_copy(update={"mcp": McpSettings(**mcp)})


async def test_tools_of_a_server_are_methods(settings: Settings) -> None:
    async with opened(settings, odd_entry()) as world:
        methods = {m.func.__name__: m for m in world.plugin.sandbox_methods}
        assert list(methods)[:3] == ["echo", "add_note", "seen"]
        assert describe_signature(methods["echo"].func).startswith("(text: str) -> ")
        assert [methods[name].once for name in ("echo", "work", "add_note", "die_once")] == [
            False,
            False,
            True,
            True,
        ]
        assert [methods[name].requires_approval for name in ("echo", "work", "add_note")] == [
            False,
            True,
            True,
        ]
        assert world.plugin.pinned
        assert await world.call("echo", "hello") == "hello"
        assert await world.call("add_note", text="first") == "first\n"
        assert await world.call("work") == "worked"
        assert world.progress == [(0.0, "step 0"), (25.0, "step 1"), (50.0, "step 2")]
        with pytest.raises(MethodFailedError, match=r"McpToolError: it failed \[2Jwith SECRET"):
            await world.call("fail")


async def test_a_server_sees_only_what_its_declaration_names(settings: Settings, tmp_path: Path) -> None:
    readable, hidden = tmp_path / "readable.txt", tmp_path / "hidden.txt"
    for path in (readable, hidden):
        path.write_text("content")
    entry = odd_entry(files={str(readable): "ro"})
    entry["env"] = {"OWN": "1", "FROM_WORKER": "${PATH}"}
    async with opened(settings, entry) as world:
        seen = await world.call("seen", path=str(readable))
        assert seen["found"] == "content"
        assert seen["environment"] == ["FROM_WORKER", "HOME", "LANG", "OWN", "PATH", "PWD", "TMPDIR"]
        assert not seen["network"]
        assert len(seen["processes"]) == 1
        if os.geteuid() == 0:
            assert seen["user"] >= settings.sandbox.uid_range_start
        assert (await world.call("seen", path=str(hidden)))["found"] == "FileNotFoundError"
        assert (await world.call("seen", path=str(settings.data_dir)))["found"] == "FileNotFoundError"
        assert (await world.call("seen", path="/etc"))["found"] != "FileNotFoundError"


async def test_links_that_change_after_the_declaration_show_no_secret(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings.data_dir.mkdir(exist_ok=True)
    for directory, text in ((settings.data_dir, "secret"), (tmp_path / "public", "content")):
        directory.mkdir(exist_ok=True)
        directory.chmod(0o755)
        (directory / "file").write_text(text)
    link = tmp_path / "link"

    def lead_to(target: Path) -> None:
        link.unlink(missing_ok=True)
        link.symlink_to(target)

    lead_to(tmp_path / "public")
    world = World(settings, odd_entry(files={str(link): "ro"}))
    lead_to(settings.data_dir)
    with pytest.raises(ServerFault, match=f"the path {link} is refused: it is the data directory"):
        await world.hub.listing(world.server)
    await world.hub.close()

    def pinned_then_changed(*arguments: Any) -> Any:
        found = pin(*arguments)
        lead_to(settings.data_dir)
        return found

    pin = programs._pinned
    monkeypatch.setattr(programs, "_pinned", pinned_then_changed)
    if not find_tools(None, root_mode=os.geteuid() == 0).binds_descriptors:
        pytest.skip("this bubblewrap cannot bind descriptors")
    lead_to(tmp_path / "public")
    async with opened(settings, odd_entry(files={str(link): "ro"})) as world:
        seen = await world.call("seen", path=str(link / "file"))
        assert seen["found"] == "content"
        assert seen["descriptors"] == [0, 1, 2]


async def test_an_installation_that_a_server_writes_shows_no_secret(
    settings: Settings, tmp_path: Path
) -> None:
    """``pyvenv.cfg`` names another directory that an interpreter needs."""
    python = Path("/usr/bin/python3")
    if not python.exists():
        pytest.skip("there is no interpreter of the system")
    environment = tmp_path / "environment"
    (environment / "bin").mkdir(parents=True)
    (environment / "bin" / "python").symlink_to(python)
    (settings.data_dir / "secrets").mkdir(parents=True)
    for home in (settings.data_dir / "bin", settings.data_dir / "secrets" / "bin"):
        (environment / "pyvenv.cfg").write_text(f"home = {home}\n")
        entry = odd_entry() | {"command": str(environment / "bin" / "python")}
        with pytest.raises(ServerFault, match="the data directory"):
            async with opened(settings, entry):
                pass
    (environment / "pyvenv.cfg").write_text(f"home = {python.parent}\n")
    async with opened(settings, entry) as world:
        assert await world.call("echo", "hi") == "hi"


async def test_a_value_with_a_nul_character_adds_no_argument_of_the_sandbox(
    settings: Settings, tmp_path: Path
) -> None:
    spec = programs.ProgramSpec(
        key="nul", command=("/usr/bin/true",), environment={"A": "b\0--ro-bind\0/etc\0/mnt"}, home=tmp_path,
        files={}, secrets={}, network=False, memory_bytes=1 << 30, max_processes=16,
    )  # fmt: skip
    with pytest.raises(InvalidValueError, match="NUL character"):
        await programs.ProgramStarter(settings.sandbox).start(spec)


async def test_the_memory_of_an_unconfined_program_is_not_that_of_the_host(
    settings: Settings, tmp_path: Path
) -> None:
    """It shares the process namespace of the host, whose processes together use more than the limit."""
    spec = programs.ProgramSpec(
        key="free", command=("/bin/sleep", "600"), environment={}, home=tmp_path, files={}, secrets={},
        network=False, memory_bytes=64 << 20, max_processes=16,
    )  # fmt: skip
    program = await programs.ProgramStarter(settings.sandbox).start_unconfined(spec)
    try:
        assert program.confinement.memory == "nothing"
        assert not program.is_too_large()
    finally:
        await program.close()


async def test_a_server_with_a_missing_variable_does_not_start(settings: Settings) -> None:
    entry = odd_entry() | {"env": {"KEY": "${NO_SUCH_VARIABLE_HERE}"}}
    with pytest.raises(ServerFault, match="NO_SUCH_VARIABLE_HERE"):
        async with opened(settings, entry):
            pass


async def test_without_isolation_a_server_starts_only_if_the_settings_allow_it(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(*_: Any, **__: Any) -> None:
        raise SandboxUnavailableError("bubblewrap is not installed")

    monkeypatch.setattr("nekro.sandbox.programs.find_tools", missing)
    with pytest.raises(ServerFault, match="bubblewrap is not installed"):
        async with opened(settings, odd_entry()):
            pass
    async with opened(limited(settings, allow_unconfined=True), odd_entry()) as world:
        assert await world.call("echo", "hi") == "hi"
        assert (await world.call("seen"))["user"] == os.geteuid()


async def test_the_first_start_ends_what_a_killed_worker_left_of_its_starts(settings: Settings) -> None:
    """Such a worker need not run code, so nothing else ends it on a host without control groups."""
    own = own_id()
    mark = f"{own.host}/{own.boot}/{own.namespace}/{own.pid}/{own.started - 1} 0"
    left = subprocess.Popen(["/bin/sleep", "600"], env={"NEKRO_SANDBOX_LAUNCH": mark})
    try:
        async with opened(settings, odd_entry()):
            await eventually(lambda: left.poll() is not None, what="the end of the process")
        assert left.returncode == -signal.SIGKILL
    finally:
        left.kill()
        left.wait()


# -- hostile and broken servers -------------------------------------------------------------------


@pytest.mark.extended
@pytest.mark.parametrize(
    ("mode", "text"),
    [
        ("hang", "did not answer within 1 s"),
        ("crash", r"exit code 3; its last words: no SECRET was given"),
        ("garbage", "lines to its output that are not messages"),
    ],
)
async def test_a_server_that_does_not_start_is_an_error_with_its_reason(
    settings: Settings, mode: str, text: str
) -> None:
    seconds = 1 if mode == "hang" else 30
    with pytest.raises(ServerFault, match=text):
        brief = settings.model_copy(update={"plugins": PluginSettings(start_seconds=seconds)})
        async with opened(brief, odd_entry(mode)):
            pass


@pytest.fixture
def unconfined(monkeypatch: pytest.MonkeyPatch) -> list[ProgramSpec]:
    """What would be started without isolation."""
    specs: list[ProgramSpec] = []

    async def start_unconfined(_: ProgramStarter, spec: ProgramSpec) -> None:
        specs.append(spec)
        raise OSError

    monkeypatch.setattr(ProgramStarter, "start_unconfined", start_unconfined)
    return specs


@pytest.mark.parametrize(
    ("entry", "text"),
    [
        (odd_entry(files={"/no/such/path": "ro"}), "/no/such/path does not exist on this host"),
        ({"command": "no-such-program"}, "there is no program 'no-such-program'"),
    ],
    ids=["path", "program"],
)
async def test_a_server_whose_declaration_does_not_fit_the_host_is_not_started_without_isolation(
    settings: Settings, unconfined: list[ProgramSpec], entry: dict[str, Any], text: str
) -> None:
    with pytest.raises(ServerFault, match=text):
        async with opened(limited(settings, allow_unconfined=True), entry):
            pass
    assert unconfined == []


async def test_a_server_that_ends_before_its_start_is_complete_says_why_and_stays_confined(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, unconfined: list[ProgramSpec]
) -> None:
    find_first = isolated._first_pid

    async def find_late(*given: Any) -> int:
        pid = await find_first(*given)
        await eventually(lambda: not Path(f"/proc/{pid}").exists(), what="the end of the server")
        return pid

    monkeypatch.setattr(isolated, "_first_pid", find_late)
    with pytest.raises(ServerFault, match="exit code 3; its last words: no SECRET was given"):
        async with opened(limited(settings, allow_unconfined=True), odd_entry("crash")):
            pass
    assert unconfined == []


async def test_a_banner_on_the_output_is_skipped(settings: Settings) -> None:
    async with opened(settings, odd_entry("banner")) as world:
        assert await world.call("echo", "still") == "still"


async def test_a_listing_that_failed_is_made_again_in_the_same_process(settings: Settings) -> None:
    world = World(settings, odd_entry("late"))
    try:
        with pytest.raises(ServerFault, match="the index is not ready"):
            await world.hub.listing(world.server)
        await eventually(lambda: bool(world.listed.tools), what="the next listing")
        assert await world.call("echo", "x") == "x"
        assert (settings.data_dir / "mcp" / "odd" / "starts").read_text().count("started") == 1
    finally:
        await world.hub.close()


#: Bytes around an answer, each as a character.
NOISE: dict[str, dict[str, Any]] = {
    "CRLF": {"after": "\r"},
    "a byte order mark": {"before": "\xef\xbb\xbf"},
    "blanks and NUL": {"before": " \t\x00", "after": " \x00"},
    "empty lines": {"before": "\n\r\n \n", "after": "\n\n"},
    "open-webSearch#35: a banner": {"before": "\xf0\x9f\x96\xa5 Server mode: STDIO\n"},
    "colours": {"before": "\x1b[32m", "after": "\x1b[0m"},
    "a title of the terminal": {"before": "\x1b]0;server\x07"},
    "a cleared line": {"before": "\r\x1b[2K"},
    "log lines in JSON": {
        "before": '{"level": "info", "id": 1, "result": "x"}\n{"method": "GET", "id": 2}\n'
    },
    "a log line before it": {"before": "[MCP] tools/call handled\n"},
    "a text without a line break": {"before": "Loading... 100%"},
    "a coloured prefix": {"before": "\x1b[36mINFO\x1b[0m answer: "},
    "invalid UTF-8": {"before": "\xff\xfe\xfd\n\xc3(\n"},
    "invalid UTF-8 on the line": {"before": "\xc3( "},
    "a quoted request": {"before": 'DEBUG <- {"jsonrpc": "2.0", "id": 1, "method": "ping"}\n'},
    "two messages on a line": {"before": '{"jsonrpc": "2.0", "method": "notifications/x"}'},
    "an answer to an unknown id": {"before": '{"jsonrpc": "2.0", "id": 10000, "result": {}}\n'},
}


async def test_noise_around_an_answer_is_skipped(settings: Settings) -> None:
    async with opened(settings, odd_entry()) as world:
        for name, noise in NOISE.items():
            assert await asyncio.wait_for(world.call("noise", **noise), WAIT_SECONDS) == "quiet\u2028", name


async def test_a_server_that_exits_at_another_first_message_is_started_with_initialize(
    settings: Settings,
) -> None:
    """fff#797, webclaw#107, copilot-cli#4809. What it needs is remembered."""

    def starts() -> int:
        return (settings.data_dir / "mcp" / "odd" / "starts").read_text().count("started")

    async with opened(settings, odd_entry("strict")) as world:
        assert await world.call("echo", "x") == "x"
        assert starts() == 2 and world.listed.errors == []
        with pytest.raises(MethodFailedError, match=r"exit code|closed|lost"):
            await world.call("die", always=True)
        assert await world.call("echo", "again") == "again"
        assert starts() <= 4  # once for each death: `die` may run again
        about = world.listed.about[-1]
    before = starts()
    known = dataclasses.replace(world.server, about=about, is_current=True)
    try:  # another worker, which reads what was recorded
        await world.hub.listing(known)
        assert starts() == before + 1
    finally:
        await world.hub.close()


@pytest.mark.parametrize("mode", ["zero", "eager", "forgetful", "pretty"])
async def test_a_server_that_bends_the_protocol_is_used(settings: Settings, mode: str) -> None:
    """The id 0 in each answer (radare2-mcp#68), early requests, a forgotten handshake, messages on lines."""
    async with opened(settings, odd_entry(mode)) as world:
        assert await world.call("add_note", "once") == "once\n"


async def test_a_call_that_hangs_ends_after_the_declared_time(settings: Settings) -> None:
    async with opened(settings, odd_entry(timeout_seconds=0.5)) as world:
        with pytest.raises(CallTimeoutError, match="did not answer in time"):
            await world.call("work", seconds=3600)


async def test_a_cancelled_call_leaves_the_session_usable(settings: Settings) -> None:
    async with opened(settings, odd_entry()) as world:
        task = asyncio.create_task(world.call("work", seconds=1))
        await eventually(lambda: len(world.progress) == 3, what="the call's progress")
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await world.call("echo", "next") == "next"


@pytest.mark.extended
async def test_floods_of_messages_do_not_keep_the_loop_from_others(settings: Settings) -> None:
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            await asyncio.sleep(0.001)
            ticks += 1

    async with opened(settings, odd_entry("flood")) as world:
        beside = asyncio.create_task(tick())
        assert await world.call("echo", "through") == "through"
        beside.cancel()
        # 5,000 notifications come in bursts of 64 with pauses.
        assert ticks >= 70


@pytest.mark.extended
async def test_a_result_over_the_limit_fails_its_call_only(settings: Settings) -> None:
    async with opened(settings, odd_entry()) as world:
        slow = asyncio.create_task(world.call("echo", "beside"))
        with pytest.raises(MethodFailedError, match=r"has 524\d+ bytes; the limit is 8388608"):
            await world.call("big", bytes=50 << 20)
        assert await slow == "beside"
        assert len(await world.call("big", bytes=1 << 20)) == 1 << 20


@pytest.mark.extended
async def test_huge_listings_are_cut(settings: Settings) -> None:
    async with opened(limited(settings, message_bytes=32 << 20), odd_entry("huge")) as world:
        methods = {m.func.__name__: m.func for m in world.plugin.sandbox_methods}
        assert len(methods) == 500
        assert len(world.listed.tools[-1]) < 2 << 20
        assert len(methods["echo"].__doc__ or "") < 4_000
        assert describe_signature(methods["deep"]).startswith("(**more: Any)")


async def test_names_and_texts_of_a_server_cannot_pose_as_ours(settings: Settings) -> None:
    async with opened(settings, odd_entry("controls")) as world:
        first, *others = world.plugin.sandbox_methods
        assert [m.func.__name__ for m in (first, *others)] == ["e_cho_2J", "import_", "a_b", "a_b_2"]
        doc = first.func.__doc__ or ""
        assert not {"\x1b", "\x00", "\u202e", "\u2028"} & set(doc + first.name)
        assert "</plugins>" not in doc
        assert "\n> obeyme" in doc and "\nobey" not in doc
        assert describe_signature(first.func).startswith(
            "(*, class_: str = None, a_b: str = None, a_b_2: Any = None)"
        )


async def test_a_server_that_goes_on_changing_is_listed_less_and_less_often(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its methods are built again in every worker of the fleet."""
    # Long beside what a busy machine delays the loop: after a long pause a server is taken to be calm again.
    monkeypatch.setattr("nekro.extensions.mcp.client.connection.FRESH_SECONDS", 0.2)
    async with opened(settings, odd_entry("changing")) as world:
        await eventually(lambda: len(world.listed.tools) >= 5, what="listings")
        for number in range(500):
            assert await world.call("echo", str(number)) == str(number)
        assert len(world.listed.tools) < 20


async def test_a_server_that_changes_its_tools_is_listed_again(settings: Settings) -> None:
    async with opened(settings, odd_entry()) as world:
        assert await world.call("change") == "changed"
        await eventually(lambda: "fresh" in world.listed.tools[-1], what="the second listing")
        assert await world.call("fresh", "new") == "new"


async def test_a_server_that_dies_in_a_call_is_started_again(settings: Settings) -> None:
    async with opened(settings, odd_entry()) as world:
        assert await world.call("die") == "alive"


async def test_the_outcome_of_a_call_that_must_not_run_twice_is_unknown_after_a_death(
    settings: Settings,
) -> None:
    async with opened(settings, odd_entry()) as world:
        with pytest.raises(OutcomeUnknownError, match="may or may not have happened"):
            await world.call("die_once", always=True)
        assert await world.call("echo", "again") == "again"


async def test_a_server_that_was_killed_between_calls_is_started_again(settings: Settings) -> None:
    async with opened(settings, odd_entry()) as world:
        before, _ = await world.hub.listing(world.server)
        assert before.confinement is not None
        os.kill(before.confinement.process, signal.SIGKILL)
        await eventually(lambda: before.ended is not None and before.ended.is_set(), what="the end")
        assert await world.call("echo", "again") == "again"


async def test_a_server_keeps_running_when_a_reload_replaces_its_plugin(settings: Settings) -> None:
    world = World(settings, odd_entry())
    host = PluginHost([])
    before, after = world.plugin, world.plugin
    try:
        await host.start_plugin(before)
        session, _ = await world.hub.listing(world.server)
        await host.start_plugin(after)
        await host.stop_plugin(before)
        assert await world.call("echo", "still here") == "still here"
        assert (await world.hub.listing(world.server))[0] is session
        await host.stop_plugin(after)
        assert session.ended is not None and session.ended.is_set()
    finally:
        await world.hub.close()


async def test_a_server_ends_with_its_connection(settings: Settings) -> None:
    async with opened(settings, odd_entry()) as world:
        confinement = (await world.hub.listing(world.server))[0].confinement
        assert confinement is not None
        pid = confinement.process
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


# -- lines ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_lines_are_split_at_any_chunk(size: int) -> None:
    data, found = b"one\n\ntwo three\nrest", []
    splitter = LineSplitter(100)
    for start in range(0, len(data), size):
        found += splitter.feed(data[start : start + size])
    assert found == [b"one", b"", b"two three"]


@pytest.mark.parametrize("size", [7, 100_000])
@pytest.mark.parametrize(
    ("line", "request_id"),
    [
        (b'{"jsonrpc":"2.0","id":5,"result":"%s"}', 5),
        (b'{"result":"%s","jsonrpc":"2.0","id":17}', 17),
        (b'{"result":"%s \\"id\\":3}","jsonrpc":"2.0"}', None),
    ],
)
def test_a_long_line_is_skipped_and_names_its_request(line: bytes, request_id: int | None, size: int) -> None:
    data = line % (b"x" * 5_000) + b"\nnext\n"
    splitter: LineSplitter = LineSplitter(1_000)
    found: list[bytes | TooLong] = []
    for start in range(0, len(data), size):
        found += splitter.feed(data[start : start + size])
    assert found == [TooLong(len(data) - 6, request_id), b"next"]
