"""Parts of the sandbox that run without one: output, frames, groups, ownership, verdicts."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import struct
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from sandbox_lab import container_of, own_name
from waiting import WAIT_SECONDS

from broker_config.settings import SandboxSettings
from nekro.sandbox.bridge import BridgeOutcome, ExitReport
from nekro.sandbox.driver import ExitStatus
from nekro.sandbox.drivers.process import expect_hello
from nekro.sandbox.leftovers import own_id
from nekro.sandbox.limits.cgroups import find_cgroups
from nekro.sandbox.limits.enforcement import process_limits
from nekro.sandbox.limits.guards import Guard
from nekro.sandbox.models import Limit, StopType
from nekro.sandbox.run import judge
from nekro.sandbox.streams import FrameKind, FrameReader, OutputCollector, clean_text, encode_frame
from nekro.sandbox.users import hold_user, lock_directory, prepare_directories, sandbox_uid
from nekro_agent.errors import SandboxProtocolError, SandboxUnavailableError


def collector(keep_bytes: int = 1024, kill_bytes: int = 4096) -> OutputCollector:
    return OutputCollector(keep_bytes=keep_bytes, kill_bytes=kill_bytes)


class TestOutput:
    def test_output_is_complete_up_to_the_limit(self) -> None:
        output = collector()
        output.feed(b"x" * 1024)
        assert (output.text(), output.truncated) == ("x" * 1024, False)

    def test_middle_of_the_output_is_omitted_and_counted(self) -> None:
        output = collector()
        for piece in (b"h" * 700, b"m" * 5000, b"t" * 300):
            output.feed(piece)
        assert output.truncated
        assert output.text() == f"{'h' * 700}{'m' * 68}\n… 4976 bytes of output left out …\n{'t' * 256}"

    def test_chunk_boundaries_of_output_do_not_matter(self) -> None:
        rng = random.Random(7)
        data = bytes(rng.randrange(256) for _ in range(3000))
        whole, pieces = collector(), collector()
        whole.feed(data)
        for start in range(0, len(data), 17):
            pieces.feed(data[start : start + 17])
        assert whole.text() == pieces.text()

    async def test_flood_is_reported_once_and_drained(self) -> None:
        reader = asyncio.StreamReader()
        reader.feed_data(b"x" * 100_000)
        reader.feed_eof()
        reported: list[None] = []
        output = collector()
        guard = Guard("output")
        await output.pump(reader, guard=guard, on_over_limit=lambda: reported.append(None))
        assert reported == [None]
        assert reader.at_eof()

    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            ("plain\ttext\n", "plain\ttext\n"),
            ("a\r\nb\rc", "a\nb\nc"),
            ("\x1b[1;31mred\x1b[0m", "red"),
            ("\x1b]0;title\x07x\x1b]8;;http://a\x1b\\y", "xy"),
            ("\x1b", ""),
            ("\x1b[", ""),
            ("\x00\x07\x08\x7f\x9b1m", "1m"),
            ("\u202eabc\u2069", "abc"),
            ("größe 日本 👍", "größe 日本 👍"),
        ],
    )
    def test_terminal_and_control_characters_are_removed(self, text: str, expected: str) -> None:
        assert clean_text(text) == expected


async def read_frames(data: bytes, limits: dict[FrameKind, int]) -> list[tuple[FrameKind, int, bytes]]:
    reader = asyncio.StreamReader()
    reader.feed_data(data)
    reader.feed_eof()
    frames = FrameReader(reader, limits=limits)
    found = []
    while (frame := await frames.read()) is not None:
        found.append((frame.kind, frame.call_id, frame.payload))
    return found


class TestFrames:
    async def test_frames_round_trip(self) -> None:
        data = encode_frame(FrameKind.CALL, b"abc", call_id=7) + encode_frame(FrameKind.EXIT)
        frames = await read_frames(data, {FrameKind.CALL: 3, FrameKind.EXIT: 0})
        assert frames == [(FrameKind.CALL, 7, b"abc"), (FrameKind.EXIT, 0, b"")]

    @pytest.mark.parametrize("cut", [1, 8, 9, 11])
    async def test_truncated_frame_counts_as_closed(self, cut: int) -> None:
        assert await read_frames(encode_frame(FrameKind.CALL, b"abc")[:cut], {FrameKind.CALL: 3}) == []

    async def test_random_bytes_are_refused_or_closed_and_raise_nothing_else(self) -> None:
        rng = random.Random(11)
        limits = {FrameKind.CALL: 100, FrameKind.EXIT: 100}
        for _ in range(2000):
            data = struct.pack(">IBI", rng.choice([0, 4, 5, 50, 2**31]), rng.randrange(10), 1) + bytes(20)
            try:
                frames = await read_frames(data, limits)
            except SandboxProtocolError:
                continue
            assert all(kind in limits for kind, _, _ in frames)


class TestHello:
    @pytest.mark.parametrize(
        "payload",
        [
            b"[]",
            b"1",
            b"null",
            b'"x"',
            b"",
            b"\xff",
            b"{}",
            b'{"protocol": "1"}',
            b"[" * 1000,
        ],
    )
    async def test_malformed_hello_is_refused_with_a_reason(self, payload: bytes) -> None:
        reader = asyncio.StreamReader()
        reader.feed_data(encode_frame(FrameKind.HELLO, payload))
        reader.feed_eof()
        with pytest.raises(SandboxUnavailableError, match="HELLO is malformed"):
            await expect_hello(reader)

    async def test_runner_of_another_protocol_is_refused(self) -> None:
        reader = asyncio.StreamReader()
        reader.feed_data(encode_frame(FrameKind.HELLO, b'{"protocol": 99}'))
        with pytest.raises(SandboxUnavailableError, match="speaks protocol 99, this service 2; reinstall"):
            await expect_hello(reader)


def good_exit(code: int = 0, limit: str | None = None, error: str | None = None) -> BridgeOutcome:
    return BridgeOutcome(exit=ExitReport(code=code, error=error, limit=limit))


class TestVerdict:
    @pytest.mark.parametrize(
        ("outcome", "code", "killed", "expected"),
        [
            (good_exit(), 0, None, (StopType.NORMAL, None)),
            (good_exit(9), 9, None, (StopType.MANUAL, None)),
            (good_exit(8), 8, None, (StopType.ERROR, None)),
            (good_exit(0), 137, None, (StopType.ERROR, None)),
            (good_exit(0), 9, None, (StopType.ERROR, None)),
            (good_exit(0, error="x"), 0, None, (StopType.ERROR, None)),
            (good_exit(1, "memory", "MemoryError"), 1, None, (StopType.ERROR, Limit.MEMORY)),
            (good_exit(1, "wall", "liar"), 1, None, (StopType.ERROR, None)),
            (good_exit(1, "nonsense", "liar"), 1, None, (StopType.ERROR, None)),
            (BridgeOutcome(), 0, None, (StopType.ERROR, None)),
            (BridgeOutcome(), 128 + 24, None, (StopType.ERROR, Limit.CPU)),
            (BridgeOutcome(), 128 + 25, None, (StopType.ERROR, Limit.FILE_SIZE)),
            (BridgeOutcome(limit=Limit.WALL), 137, None, (StopType.TIMEOUT, Limit.WALL)),
            (good_exit(), 0, Limit.DISK, (StopType.ERROR, Limit.DISK)),
            (BridgeOutcome(), 137, Limit.OUTPUT, (StopType.ERROR, Limit.OUTPUT)),
            (BridgeOutcome(stop=StopType.AGENT), 0, None, (StopType.AGENT, None)),
            (BridgeOutcome(stop=StopType.SECURITY), 137, Limit.MEMORY, (StopType.SECURITY, None)),
        ],
    )
    def test_host_decides_the_verdict(
        self,
        outcome: BridgeOutcome,
        code: int,
        killed: Limit | None,
        expected: tuple[StopType, Limit | None],
    ) -> None:
        verdict = judge(outcome, ExitStatus(code=code), limit=killed, stopped_by_operator=False)
        assert verdict[:2] == expected

    def test_reported_kernel_limit_is_the_reason_of_a_crash(self) -> None:
        status = ExitStatus(code=137, limit=Limit.MEMORY)
        assert judge(BridgeOutcome(), status, limit=None, stopped_by_operator=False)[:2] == (
            StopType.ERROR,
            Limit.MEMORY,
        )


def fake_groups(
    tmp_path: Path, *, controllers: str = "cpu memory pids", enabled: str = ""
) -> tuple[Path, Path]:
    """A directory that looks like a delegated cgroup v2, and a /proc/self that points at it."""
    own = tmp_path / "cgroup" / "service.slice" / "nekro.service"
    own.mkdir(parents=True)
    (own / "cgroup.controllers").write_text(controllers)
    (own / "cgroup.subtree_control").write_text(enabled)
    (own / "cgroup.procs").write_text(f"{os.getpid()}\n")
    proc = tmp_path / "proc"
    proc.mkdir()
    (proc / "cgroup").write_text("0::/service.slice/nekro.service\n")
    (proc / "mountinfo").write_text(f"25 1 0:22 / {tmp_path / 'cgroup'} rw - cgroup2 cgroup2 rw\n")
    return own, proc


def newest_group(own: Path) -> Path:
    return max(own.glob("nekro-run-*"), key=lambda path: int(path.name.rsplit("-", 1)[1]))


@pytest.fixture
def quick_removal(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plain directory keeps its files, and cannot be removed as a group can."""
    monkeypatch.setattr("nekro.sandbox.limits.cgroups.GONE_SECONDS", 0)


@pytest.mark.usefixtures("quick_removal")
class TestControlGroups:
    def test_version_2_moves_the_service_aside_and_limits_the_run(self, tmp_path: Path) -> None:
        own, proc = fake_groups(tmp_path)
        groups, check = find_cgroups(SandboxSettings(memory_bytes=100 << 20), proc=proc)
        assert groups is not None
        assert check.ok
        assert "cgroup v2" in check.detail
        assert (own / "nekro-service" / "cgroup.procs").read_text() == str(os.getpid())
        assert (own / "cgroup.subtree_control").read_text() == "+memory +pids +cpu"
        group = groups.create()
        path = newest_group(own)
        assert (path / "memory.max").read_text() == str(100 << 20)
        assert (path / "memory.swap.max").read_text() == "0"
        assert (path / "pids.max").read_text() == "65"  # and the process that starts the sandbox
        assert (path / "cpu.max").read_text() == "100000 100000"
        group.attach(4242)
        assert (path / "cgroup.procs").read_text() == "4242"
        assert group.processes() == [4242]

    def test_version_2_reads_limits_and_usage(self, tmp_path: Path) -> None:
        own, proc = fake_groups(tmp_path, enabled="memory pids")
        groups, _ = find_cgroups(SandboxSettings(), proc=proc)
        assert groups is not None
        group = groups.create()
        path = newest_group(own)
        assert group.limit_hit() is None
        (path / "pids.events").write_text("max 3\n")
        assert group.limit_hit() is Limit.PIDS
        (path / "memory.events").write_text("low 0\noom 1\noom_kill 2\n")
        assert group.limit_hit() is Limit.MEMORY
        (path / "memory.current").write_text("1000\n")
        (path / "pids.current").write_text("5\n")
        (path / "cpu.stat").write_text("usage_usec 2500000\n")
        usage = group.usage()
        assert (usage.memory_bytes, usage.processes, usage.cpu_seconds) == (1000, 5, 2.5)

    def test_restarted_service_uses_the_same_parent_group(self, tmp_path: Path) -> None:
        own, proc = fake_groups(tmp_path, enabled="memory pids")
        (own / "nekro-service").mkdir()
        (proc / "cgroup").write_text("0::/service.slice/nekro.service/nekro-service\n")
        groups, check = find_cgroups(SandboxSettings(), proc=proc)
        assert groups is not None
        assert check.ok
        assert list(own.glob("nekro-run-*"))

    def test_no_controllers_means_no_groups_and_a_suggested_fix(self, tmp_path: Path) -> None:
        _, proc = fake_groups(tmp_path, controllers="cpu")
        groups, check = find_cgroups(SandboxSettings(), proc=proc)
        assert groups is None
        assert (check.ok, check.needed) == (False, False)
        assert "no memory and no pids controller" in check.detail
        assert "Delegate=yes" in check.fix

    def test_groups_of_a_killed_service_are_removed(self, tmp_path: Path) -> None:
        own, proc = fake_groups(tmp_path, enabled="memory pids")
        me = own_id()
        # The second has this process's id and another start time: the id was reused.
        gone = [f"4194999-1-{me.namespace}-0", f"{me.pid}-{me.started + 1}-{me.namespace}-0"]
        kept = [f"{me.pid}-{me.started}-{me.namespace}-99999", "4194999-1-1-0", "4194999-0", "x"]
        for name in (*gone, *kept):
            (own / f"nekro-run-{name}").mkdir()
        find_cgroups(SandboxSettings(), proc=proc)
        assert [name for name in (*gone, *kept) if (own / f"nekro-run-{name}").exists()] == kept


class TestOwnership:
    def test_user_of_a_container_is_stable_and_in_the_pool(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("nekro.sandbox.users._RANGE_SIZE", 100)
        settings = SandboxSettings(uid_range_start=300_000)
        users = {sandbox_uid(f"box{number}", settings=settings) for number in range(500)}
        assert users <= set(range(300_000, 300_100))
        assert len(users) > 90
        assert sandbox_uid("box1", settings=settings) == sandbox_uid("box1", settings=settings)

    @pytest.mark.root
    def test_two_containers_never_have_one_user_at_the_same_time(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        if os.geteuid() != 0:
            pytest.skip("an ordinary user's code runs as that user")
        monkeypatch.setattr("nekro.sandbox.users._RANGE_SIZE", 3)
        settings = SandboxSettings(uid_range_start=300_000)
        keys = ["one", "two", "three"]
        holds = [hold_user(key, settings=settings, directory=tmp_path) for key in keys]
        assert sorted(hold.uid for hold in holds) == [300_000, 300_001, 300_002]
        taken = holds[1].uid
        again = hold_user("two", settings=settings, directory=tmp_path)
        assert again.uid == taken, "two sandboxes of one container share its files, and so its user"
        with pytest.raises(SandboxUnavailableError, match="all 3 host users"):
            hold_user("four", settings=settings, directory=tmp_path)
        holds[1].release()
        with pytest.raises(SandboxUnavailableError):
            hold_user("four", settings=settings, directory=tmp_path)
        again.release()
        with hold_user("four", settings=settings, directory=tmp_path) as freed:
            assert freed.uid == taken
        for hold in holds:
            hold.release()

    @pytest.mark.root
    def test_user_is_held_across_processes_and_released_by_a_killed_one(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        if os.geteuid() != 0:
            pytest.skip("an ordinary user's code runs as that user")
        monkeypatch.setattr("nekro.sandbox.users._RANGE_SIZE", 1)
        settings = SandboxSettings(uid_range_start=300_000)
        program = (
            "import sys\nfrom pathlib import Path\n"
            "from broker_config.settings import SandboxSettings\nfrom nekro.sandbox import users\n"
            "users._RANGE_SIZE = 1\n"
            "settings = SandboxSettings(uid_range_start=300_000)\n"
            "hold = users.hold_user('other', settings=settings, directory=Path(sys.argv[1]))\n"
            "print(hold.uid, flush=True)\nsys.stdin.readline()"
        )
        with subprocess.Popen(
            [sys.executable, "-c", program, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as other:
            assert other.stdout is not None and other.stdout.readline() == b"300000\n"
            with pytest.raises(SandboxUnavailableError):
                hold_user("mine", settings=settings, directory=tmp_path)
            other.kill()
            other.wait(WAIT_SECONDS)
        with hold_user("mine", settings=settings, directory=tmp_path) as hold:
            assert hold.uid == 300_000

    @pytest.mark.root
    def test_a_lab_has_a_user_that_no_other_sandbox_has(self, monkeypatch: pytest.MonkeyPatch) -> None:
        if os.geteuid() != 0:
            pytest.skip("an ordinary user's code runs as that user")
        settings = SandboxSettings()
        with hold_user("another", settings=settings) as another:
            names = map(str, itertools.count())
            same = next(
                name
                for name in names
                if sandbox_uid(container_of(name, "chat"), settings=settings) == another.uid
            )
            offered = iter([same, *"abc"])
            monkeypatch.setattr("sandbox_lab.uuid4", lambda: SimpleNamespace(hex=next(offered)))
            with own_name(settings) as name:
                assert name in "abc"

    @pytest.mark.root
    def test_locks_are_in_a_directory_that_only_root_can_write(self, tmp_path: Path) -> None:
        if os.geteuid() != 0:
            pytest.skip("locks are for root mode")
        missing, planted, good = tmp_path / "missing", tmp_path / "planted", tmp_path / "good"
        good.mkdir()
        planted.mkdir()
        (planted / "nekro-sandbox-users").symlink_to(good)
        (foreign := tmp_path / "foreign" / "nekro-sandbox-users").mkdir(parents=True)
        os.chown(foreign, 4711, 4711)
        (loose := tmp_path / "loose" / "nekro-sandbox-users").mkdir(parents=True)
        loose.chmod(0o777)
        bad = [missing, planted, foreign.parent, loose.parent]
        found = lock_directory([*bad, good])
        assert (found.parent, found.stat().st_mode & 0o777) == (good, 0o700)
        with pytest.raises(SandboxUnavailableError, match="only root can write to"):
            lock_directory(bad)

    @pytest.mark.root
    def test_files_of_a_run_with_another_user_change_their_owner(self, tmp_path: Path) -> None:
        if os.geteuid() != 0:
            pytest.skip("an ordinary user gives nothing away")
        shared, uploads = tmp_path / "shared", tmp_path / "uploads"
        uploads.mkdir()
        (shared / "deep").mkdir(parents=True)
        (shared / "deep" / "file").write_text("x")
        (shared / "foreign").write_text("x")
        for uid in (12345, 12346):
            prepare_directories(shared_dir=shared, uploads_dir=uploads, uid=uid, settings=SandboxSettings())
            os.chown(shared / "foreign", 4711, 4711)
        handed = (shared, shared / "deep", shared / "deep" / "file")
        assert {path.stat().st_uid for path in handed} == {12346}
        assert (shared / "foreign").stat().st_uid == 4711

    @pytest.mark.root
    def test_directories_are_owned_by_the_codes_user(self, tmp_path: Path) -> None:
        if os.geteuid() != 0:
            pytest.skip("an ordinary user gives nothing away")
        shared, uploads = tmp_path / "shared", tmp_path / "uploads"
        for directory in (shared, uploads):
            (directory / "deep").mkdir(parents=True)
            (directory / "deep" / "file").write_text("x")
            (directory / "deep" / "file").chmod(0o600)
        prepare_directories(shared_dir=shared, uploads_dir=uploads, uid=12345, settings=SandboxSettings())
        for path in (shared, shared / "deep", shared / "deep" / "file"):
            assert path.stat().st_uid == 12345
        assert shared.stat().st_mode & 0o777 == 0o700
        assert (uploads / "deep" / "file").stat().st_uid == 0
        assert (uploads / "deep" / "file").stat().st_mode & 0o777 == 0o604


def test_address_space_limit_exceeds_the_memory_limit() -> None:
    assert process_limits(SandboxSettings(memory_bytes=64 << 20))["AS"] == 1 << 30
    assert process_limits(SandboxSettings(memory_bytes=1 << 30))["AS"] == 2 << 30
