"""Attacks that only a fork server has, and its faults: a template that is killed, frozen or slow."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from sandbox_lab import Lab, as_other_user, lab
from waiting import WAIT_SECONDS

from broker_config.settings import SandboxSettings
from nekro.sandbox.driver import Sandbox
from nekro.sandbox.drivers.bwrap import BwrapDriver
from nekro.sandbox.drivers.fork_link import Kind
from nekro.sandbox.drivers.fork_server import ForkServer, imports_packages
from nekro.sandbox.drivers.selection import check_fork_server
from nekro.sandbox.limits import proc_files
from nekro.sandbox.limits.cgroups import Group, _GroupV1, _GroupV2
from nekro.sandbox.models import StopType

#: Without the base layer: its packages take a second to import.
BARE: dict[str, Any] = {"fork_server": True, "packages_dir": Path("/nonexistent")}


@pytest.fixture
async def forks(tmp_path: Path, bwrap_driver: BwrapDriver) -> AsyncIterator[Lab]:
    """A lab whose runs are forked; skipped where the kernel does not allow it."""
    async with lab(tmp_path, **BARE) as made:
        server = server_of(made)
        if server.reason:
            pytest.skip(server.reason)
        await made.wait_for_packages()
        yield made


def server_of(box: Lab, *, loaded: bool = False) -> ForkServer:
    """The fork server of a lab for programs without packages, or with them."""
    driver = box.manager._driver
    assert isinstance(driver, BwrapDriver) and driver.forks is not None
    with_packages, without = driver.forks
    return with_packages if loaded else without


def sandbox_is_grouped(box: Lab) -> bool:
    """Whether sandboxes have control groups here."""
    driver = box.manager._driver
    assert isinstance(driver, BwrapDriver)
    return driver._cgroups[0] is not None


def id_of(pidfd: int) -> int:
    """Host id of a process."""
    return int(proc_files.field_of(proc_files.read(f"/proc/self/fdinfo/{pidfd}"), b"Pid"))


def template_of(box: Lab, *, loaded: bool = False) -> int:
    """Host id of the template that forks now."""
    server = server_of(box, loaded=loaded)._server
    assert server is not None
    return id_of(server.template)


def sandbox_of(box: Lab) -> Sandbox:
    """The sandbox of the only run."""
    (run,) = box.manager._running.values()
    return run._sandbox


async def is_forked(box: Lab, code: str = "report(1)", **changes: Any) -> bool:
    """Run code that succeeds; returns whether it was forked."""
    seen: list[bool] = []

    def report(_: object) -> None:
        seen.append(sandbox_of(box).is_forked)

    box.handlers["report"] = report
    result = await box.run(code, **changes)
    assert result.stop_type is StopType.NORMAL, result
    return seen[0]


async def until(condition: Any) -> None:
    """Wait for a condition."""
    async with asyncio.timeout(WAIT_SECONDS):
        while not condition():
            await asyncio.sleep(0.02)


async def test_forks_runs_and_says_so(forks: Lab) -> None:
    assert await is_forked(forks)
    check = await check_fork_server(BwrapDriver(forks.settings), forks.settings)
    assert check is not None and check.ok, check
    off = SandboxSettings(fork_server=False)
    assert await check_fork_server(BwrapDriver(off), off) is None


async def test_process_that_runs_one_program_starts_no_fork_server(tmp_path: Path) -> None:
    driver = BwrapDriver(SandboxSettings(**BARE))
    assert driver.forks is not None
    for server in driver.forks:
        kind = Kind(layers=(), preload=(), packages=server._packages, areas=())
        assert not server.is_ready(kind) and server._starting is None
        assert not server.is_ready(kind) and server._starting is not None
    await driver.close()


async def test_forks_runs_of_an_ordinary_user(other_user: None) -> None:
    code = """
import os
report([os.getuid(), sorted(os.listdir("/app")), os.path.ismount("/app/shared")])
report(os.listdir("/opt/sandbox/areas/shared") + os.listdir("/opt/sandbox/areas/uploads"))
open("shared/written", "w").close()
report(open("/proc/1/cmdline", "rb").read().split(b"\\0")[-2].isdigit())
"""
    settings = {"fork_server": True, "packages_dir": "/nonexistent"}
    answer = as_other_user({"code": code, "settings": settings})
    assert answer["stop"] == "NORMAL", answer
    # The last word of a forked run's first command line is a descriptor; else it is the configuration.
    assert answer["reports"] == [[65534, ["shared", "uploads"], True], [], True]


#: As the comment of a program, it makes the program run in a fork of the template that has packages.
MENTION = {False: "", True: "# numpy\n"}
both = pytest.mark.parametrize("loaded", [False, True], ids=["bare", "loaded"])


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("print('hello')", False),
        ("import os, json\nfrom datetime import date\n  import re", False),
        ("print('1 import of goods')  # from here on", False),
        ("import os, numpy", True),
        ("__import__('matplotlib')", True),
        ("if True:\n    import seaborn as sns", True),
        ("from own_module import value", True),
    ],
)
def test_code_that_seems_to_import_packages_is_told_by_its_text(code: str, expected: bool) -> None:
    assert imports_packages([code, ""]) is imports_packages(["", code]) is expected


@both
async def test_runs_are_forked_from_the_template_of_their_kind(forks: Lab, loaded: bool) -> None:
    server = server_of(forks, loaded=loaded)._server
    assert server is not None
    seen: list[int] = []
    forks.handlers["look"] = lambda: seen.append(len(server.running))
    assert await is_forked(forks, MENTION[loaded] + "look()\nreport(1)")
    assert seen == [1]


@both
async def test_attack_K25_template_and_keeper_are_out_of_reach(forks: Lab, loaded: bool) -> None:
    code = f"""{MENTION[loaded]}
attempt("processes", lambda: sorted(int(n) for n in os.listdir("/proc") if n.isdigit()))
for pid in (1, os.getppid(), {template_of(forks, loaded=loaded)}):
    attempt(f"memory of {{pid}}", lambda: open(f"/proc/{{pid}}/mem", "rb").read(1))
    attempt(f"maps of {{pid}}", lambda: open(f"/proc/{{pid}}/maps", "rb").read(1))
    attempt(f"root of {{pid}}", lambda: os.listdir(f"/proc/{{pid}}/root"))
    # Their numbers may be listed by the same user.
    attempt(f"descriptors of {{pid}}", lambda: os.readlink(f"/proc/{{pid}}/fd/1"))
    attempt(f"output of {{pid}}", lambda: open(f"/proc/{{pid}}/fd/1", "wb"))
    attempt(f"trace {{pid}}", lambda: syscall(101, 16, pid, 0, 0))
    attempt(f"descriptor {{pid}}", lambda: syscall(434, pid, 0))
attempt("parent", os.getppid)
attempt("stop the template", lambda: os.kill({template_of(forks, loaded=loaded)}, 19))
attempt("abstract sockets", lambda: open("/proc/net/unix").read().count("\\n"))
areas = "/opt/sandbox/areas"
attempt("areas", lambda: [os.listdir(f"{{areas}}/{{name}}") for name in os.listdir(areas)])
attempt("group of processes", lambda: (os.getpgid(0) == os.getpid(), os.getsid(0) == os.getpid()))
attempt("control groups", lambda: [l for l in open("/proc/self/cgroup") if "nekro" in l])
attempt("descriptors", lambda: sorted(int(fd) for fd in os.listdir("/proc/self/fd"))[:-1])
attempt("mounts", lambda: [l for l in open("/proc/self/mountinfo") if "areas" in l])
"""
    attempts = await forks.attempts(code)
    assert template_of(forks, loaded=loaded) > 2
    answers = {label: outcome[1] for label, outcome in attempts.items() if outcome[0] == "done"}
    assert answers == {
        "processes": "[1, 2]",
        "parent": "0",
        "abstract sockets": "1",  # the header
        "areas": "[]" if os.geteuid() == 0 else "[[], []]",
        "group of processes": "(True, True)",
        "control groups": "[]",
        "descriptors": "[0, 1, 2, 3]",
        "mounts": "[]",
    }


async def test_attack_K26_signals_to_all_end_only_the_run(forks: Lab) -> None:
    template = template_of(forks)
    result = await forks.run("import os\nos.kill(-1, 9)\nos.kill(os.getpid(), 9)")
    assert result.stop_type is StopType.ERROR
    assert await is_forked(forks)
    assert template_of(forks) == template


@both
async def test_attack_K27_what_a_run_changes_is_not_seen_by_the_next(forks: Lab, loaded: bool) -> None:
    change = """
import builtins, ctypes, json, sys
builtins.planted = json.planted = sys.planted = 1
sys.modules["planted"] = json
sys.path.insert(0, "/app/shared")
small = ctypes.c_char.from_address(id(251) + 24)
small.value = b"\\x09"
open("/tmp/planted", "w").close()
open("/dev/shm/planted", "w").close()
"""
    assert (await forks.run(MENTION[loaded] + change)).stop_type is StopType.NORMAL
    look = """
import builtins, json, os, sys
found = [hasattr(place, "planted") for place in (builtins, json, sys)]
report([found, "planted" in sys.modules, "/app/shared" in sys.path, str(250 + int("1"))])
report(os.listdir("/tmp") + os.listdir("/dev/shm"))
"""
    await forks.run(MENTION[loaded] + look)
    assert forks.reports == [[[False] * 3, False, False, "251"], []]


@both
async def test_attack_K28_random_state_is_not_shared(forks: Lab, loaded: bool) -> None:
    code = """
import random, secrets, tempfile, uuid
report([random.random(), secrets.token_hex(8), str(uuid.uuid4()), tempfile.mktemp()])
"""
    for _ in range(3):
        assert (await forks.run(MENTION[loaded] + code)).stop_type is StopType.NORMAL
    for values in zip(*forks.reports, strict=True):
        assert len(set(values)) == 3, values


@both
async def test_attack_K29_locks_and_threads_are_as_in_a_new_process(forks: Lab, loaded: bool) -> None:
    code = """
import logging, os, threading
alone = len(os.listdir("/proc/self/task"))
def work():
    import decimal
    logging.getLogger("x").warning("from a thread")
    done.append(decimal.Decimal(1))
done = []
thread = threading.Thread(target=work)
thread.start()
thread.join(20)
report([alone, len(done), threading.main_thread().is_alive(), threading.active_count()])
"""
    assert (await forks.run(MENTION[loaded] + code)).stop_type is StopType.NORMAL
    assert forks.reports == [[1, 1, True, 1]]
    assert len(os.listdir(f"/proc/{template_of(forks, loaded=loaded)}/task")) == 1


async def test_attack_K30_pages_of_the_template_that_a_run_writes_count_as_its_own(forks: Lab) -> None:
    if not sandbox_is_grouped(forks):
        pytest.skip("no control group counts memory here")
    code = """
import ctypes, re
pages = []
for line in open("/proc/self/maps"):
    found = re.match("([0-9a-f]+)-([0-9a-f]+) rw-p .* 0 +(?!.stack)", line)
    if found:
        first, end = (int(word, 16) for word in found.groups())
        pages += range(first, end, 4096)
resident = open("/proc/self/pagemap", "rb", buffering=0)
def is_present(page):
    resident.seek(page // 4096 * 8)
    return resident.read(8)[7] & 0x80
pages = [page for page in pages if is_present(page)]
look()
for page in pages:
    ctypes.memmove(page, page, 1)
look()
report(len(pages))
"""
    seen: list[int] = []
    forks.handlers["look"] = lambda: seen.append(sandbox_of(forks).usage().memory_bytes or 0)
    result = await forks.run(code)
    assert result.stop_type is StopType.NORMAL, result
    (pages,) = forks.reports
    before, after = seen
    assert pages > 500 and before < after and pages * 4096 <= after


@both
async def test_attack_K31_keeper_and_template_hold_little(forks: Lab, loaded: bool) -> None:
    template = template_of(forks, loaded=loaded)
    for pid in (template, parent_of(template)):
        status = proc_files.read(f"/proc/{pid}/status")
        value = {
            name: proc_files.field_of(status, name)
            for name in (
                b"Seccomp",
                b"Seccomp_filters",
                b"NoNewPrivs",
                b"CapEff",
                b"CapPrm",
                b"CapBnd",
                b"Uid",
            )
        }
        assert (value[b"Seccomp"], value[b"Seccomp_filters"], value[b"NoNewPrivs"]) == (b"2", b"1", b"1")
        # SETGID, SETUID, SYS_CHROOT and SYS_ADMIN, in a user namespace of their own.
        assert int(value[b"CapEff"], 16) == int(value[b"CapPrm"], 16) == 0x2400C0
        assert os.readlink(f"/proc/{pid}/ns/user") != os.readlink("/proc/self/ns/user")
        uids = {int(word) for word in value[b"Uid"].split()}
        assert len(uids) == 1 and (os.geteuid() != 0 or min(uids) >= forks.settings.uid_range_start)


async def test_packages_are_imported_and_set_up(tmp_path: Path, bwrap_driver: BwrapDriver) -> None:
    async with lab(tmp_path, fork_server=True) as box:
        code = """
import sys
report([name in sys.modules for name in ("numpy", "pandas", "matplotlib.pyplot")])
import numpy, pandas, matplotlib.pyplot as plt
report([float(numpy.random.rand()), pandas.get_option("display.width"), plt.get_backend().lower()])
plt.plot([1, 2])
plt.show()
"""
        results = [await box.run(code) for _ in range(2)]
        if "No module named" in (results[0].error or ""):
            pytest.skip("the base layer is not installed")
        assert [result.stop_type for result in results] == [StopType.NORMAL] * 2, results
        imported, values, again, others = box.reports
        assert imported == again == [True] * 3
        assert values[1:] == others[1:] == [150, "agg"]
        assert values[0] != others[0]
        assert "[figure saved as /app/shared/figure-1.png]" in results[0].output
        box.reports.clear()
        await box.run("import sys\nreport([name for name in sys.modules if name.startswith('num' + 'py')])")
        assert box.reports == [[]]


async def test_attack_L18_many_processes_of_one_run_stop_no_other(forks: Lab) -> None:
    bomb = """
import os, time
for _ in range(1000):
    try:
        if os.fork() == 0:
            time.sleep(60)
    except OSError:
        break
ready()
time.sleep(60)
"""
    ready = asyncio.Event()
    forks.handlers["ready"] = ready.set
    bombing = asyncio.create_task(forks.run(bomb, chat_key="bomb"))
    async with asyncio.timeout(30):
        await ready.wait()
    forks.handlers["many"] = lambda: None
    code = "import os\nfor _ in range(20):\n    if os.fork() == 0:\n        os._exit(0)\nmany()"
    assert (await forks.run(code, chat_key="other")).stop_type is StopType.NORMAL
    bombing.cancel()
    await asyncio.wait([bombing])


async def test_runs_of_a_killed_template_end_as_they_would(forks: Lab) -> None:
    template = template_of(forks)
    go = asyncio.Event()
    begun = asyncio.Event()

    async def hold() -> None:
        begun.set()
        await go.wait()

    forks.handlers["hold"] = hold
    running = asyncio.create_task(forks.run("hold()\nprint('done')", chat_key="first"))
    async with asyncio.timeout(30):
        await begun.wait()
    os.kill(template, signal.SIGKILL)
    others = [forks.run(f"print({number})", chat_key=f"chat{number}") for number in range(3)]
    results = await asyncio.gather(*others)
    assert [result.output for result in results] == ["0\n", "1\n", "2\n"]
    go.set()
    result = await running
    assert (result.stop_type, result.output) == (StopType.NORMAL, "done\n")
    server = server_of(forks)
    await until(lambda: server._server is not None and server._server.takes_runs)
    assert template_of(forks) != template
    assert await is_forked(forks)


@pytest.mark.parametrize("victim", ["template", "keeper"])
async def test_runs_of_a_frozen_fork_server_are_started_without_it(
    forks: Lab, victim: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nekro.sandbox.drivers.fork_link._FORK_SECONDS", 0.2)
    server = server_of(forks)._server
    assert server is not None
    frozen = template_of(forks) if victim == "template" else parent_of(template_of(forks))
    os.kill(frozen, signal.SIGSTOP)
    try:
        results = await asyncio.gather(
            *(forks.run(f"print({number})", chat_key=f"chat{number}") for number in range(4))
        )
        assert [result.output for result in results] == ["0\n", "1\n", "2\n", "3\n"]
        assert not server.takes_runs
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(frozen, signal.SIGCONT)
    # What it forks now nobody waits for: it is killed.
    await until(lambda: server.takes_runs)
    monkeypatch.undo()
    assert await is_forked(forks)


async def run_four_chats(forks: Lab, *, runs: int) -> None:
    """Run code in four chats at the same time, and expect each result."""

    async def chat(number: int) -> None:
        code = "import time\ntime.sleep(0.05)\nprint({}, echo(1)[0][0])"
        for run in range(runs):
            result = await forks.run(code.format(run), chat_key=f"chat{number}")
            assert (result.stop_type, result.output) == (StopType.NORMAL, f"{run} 1\n"), result

    await asyncio.gather(*(chat(number) for number in range(4)))


async def ends_idle(server: ForkServer) -> None:
    """Wait until a server takes runs, and expect that none is left in it."""
    await until(lambda: server._server is not None and server._server.takes_runs)
    assert server._server is not None
    assert server._server.running == {} and server._server.waiting == {}


@pytest.mark.extended
async def test_no_run_is_lost_while_templates_are_killed_and_frozen_under_load(
    forks: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nekro.sandbox.drivers.fork_link._FORK_SECONDS", 0.3)
    over = asyncio.Event()

    async def harm() -> None:
        for number in itertools.count():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.3):
                    await over.wait()
                    return
            server = server_of(forks)._server
            if server is None or server.template < 0:
                continue
            template = id_of(server.template)
            with contextlib.suppress(ProcessLookupError):
                os.kill(template, signal.SIGSTOP if number % 2 else signal.SIGKILL)
                await asyncio.sleep(0.5)
                os.kill(template, signal.SIGCONT)

    harming = asyncio.create_task(harm())
    try:
        await run_four_chats(forks, runs=15)
    finally:
        over.set()
        await harming
    await ends_idle(server_of(forks))
    monkeypatch.undo()
    assert await is_forked(forks)


def starve(group: Group, lack: str) -> None:
    """Leave a control group hardly any processor time or memory."""
    if isinstance(group, _GroupV2):
        files = {"processor": [("cpu.max", "1000 100000")], "memory": [("memory.max", "65536")]}
        path = dict.fromkeys(files, group.path)
    else:
        assert isinstance(group, _GroupV1)
        limits = [(f"memory.{name}limit_in_bytes", "65536") for name in ("", "memsw.")]
        files = {"processor": [("cpu.cfs_quota_us", "1000")], "memory": limits}
        path = {"processor": group.paths["cpu"], "memory": group.paths["memory"]}
    for name, value in files[lack]:
        (path[lack] / name).write_text(value)


@pytest.mark.extended
@pytest.mark.parametrize("lack", ["processor", "memory"])
async def test_no_run_is_lost_while_templates_starve_under_load(
    forks: Lab, monkeypatch: pytest.MonkeyPatch, lack: str
) -> None:
    monkeypatch.setattr("nekro.sandbox.drivers.fork_link._FORK_SECONDS", 0.5)
    if not sandbox_is_grouped(forks):
        pytest.skip("no control group limits a template here")
    driver = forks.manager._driver
    assert isinstance(driver, BwrapDriver) and driver._cgroups[0] is not None
    groups: dict[int, Group] = {}
    over = asyncio.Event()

    async def harm() -> None:
        while not over.is_set():
            server = server_of(forks)._server
            template = 0 if server is None or server.template < 0 else id_of(server.template)
            if template and template not in groups and driver._cgroups[0] is not None:
                groups[template] = driver._cgroups[0].create()
                with contextlib.suppress(OSError):  # it has ended
                    groups[template].attach(template)
                    starve(groups[template], lack)
            await asyncio.sleep(0.1)

    harming = asyncio.create_task(harm())
    try:
        await run_four_chats(forks, runs=6)
    finally:
        over.set()
        await harming
        for group in groups.values():  # ends the templates in them
            assert await asyncio.to_thread(group.remove)
    server = server_of(forks)
    for _ in range(2):  # the second one starts a server where the last one was retired
        await forks.run("print(1)")
    await ends_idle(server)
    monkeypatch.undo()
    assert groups and await is_forked(forks)


async def test_template_that_stays_frozen_is_replaced(forks: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nekro.sandbox.drivers.fork_link._FORK_SECONDS", 0.1)
    monkeypatch.setattr("nekro.sandbox.drivers.fork_link.GUARD_SECONDS", 0.1)
    server, template = server_of(forks)._server, template_of(forks)
    assert server is not None
    os.kill(template, signal.SIGSTOP)
    assert (await forks.run("print(1)")).output == "1\n"
    await until(lambda: server.takes_runs and template_of(forks) != template)
    monkeypatch.undo()
    assert await is_forked(forks)


async def test_killed_keeper_ends_its_runs_and_is_replaced(forks: Lab) -> None:
    keeper = parent_of(template_of(forks))

    def kill() -> None:
        os.kill(keeper, signal.SIGKILL)

    forks.handlers["kill"] = kill
    result = await forks.run("import time\nkill()\ntime.sleep(60)")
    assert result.stop_type is StopType.ERROR
    assert (await forks.run("print(1)")).output == "1\n"
    server = server_of(forks)
    await until(lambda: server._server is not None and server._server.takes_runs)
    assert await is_forked(forks)


async def test_template_is_replaced_after_many_forks(
    tmp_path: Path, bwrap_driver: BwrapDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nekro.sandbox.drivers.fork_server._MOST_FORKS", 3)
    async with lab(tmp_path, **BARE) as box:
        server = server_of(box)
        if server.reason:
            pytest.skip(server.reason)
        first = template_of(box)
        # Of a library and of an object: the interpreter itself may be loaded at a fixed address.
        look = """
import ctypes
report([ctypes.cast(ctypes.CDLL(None).getpid, ctypes.c_void_p).value, id(ctypes), hash("text")])
"""
        await box.run(look)
        open_files = len(os.listdir(f"/proc/{first}/fd"))
        for _ in range(2):
            await box.run("print(1)")
        await until(lambda: template_of(box) != first)
        # It has no descriptor of the run that was its predecessor's last.
        assert len(os.listdir(f"/proc/{template_of(box)}/fd")) == open_files
        await box.run(look)
        # Another layout of the address space. The seed is that of the installation: programs are repeated.
        (*one, seeded), (*other, seeded_later) = box.reports
        assert all(left != right for left, right in zip(one, other, strict=True))
        assert seeded == seeded_later
        assert await is_forked(box)


async def test_own_packages_of_a_chat_are_not_forked(
    forks: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = server_of(forks)
    layer = tmp_path / "layer"
    layer.mkdir()
    (layer / "own_package.py").write_text("value = 5")
    layer.chmod(0o755)

    class Packages:
        async def bring(self, container_key: str) -> None: ...

        def layers(self, container_key: str) -> tuple[Path, ...]:
            return (layer,)

        async def close(self) -> None: ...

    monkeypatch.setattr(forks.manager, "_packages", Packages())
    assert not await is_forked(forks, "import own_package\nreport(own_package.value)")
    assert server._server is not None and server._server.takes_runs


async def test_runs_leave_nothing_behind(forks: Lab) -> None:
    template = template_of(forks)
    keeper = parent_of(template)
    endings = ("print(1)", "1 / 0", "import os\nos.abort()", "import os\nif os.fork() == 0:\n    os.setsid()")
    *_, resting, _ = state_of(template, keeper)
    for code in endings:
        await forks.run(code)
    await until(lambda: state_of(template, keeper)[-2] == resting)  # the processes of the four have ended
    await asyncio.sleep(0.2)
    before = state_of(template, keeper)
    for number in range(100):
        await forks.run(endings[number % len(endings)])
    assert template_of(forks) == template
    await until(lambda: state_of(template, keeper) == before)


def state_of(template: int, keeper: int) -> list[int]:
    """Descriptors of this process, template and keeper, and the processes below the keeper."""
    open_files = [len(os.listdir(f"/proc/{pid}/fd")) for pid in ("self", template, keeper)]
    children = Path(f"/proc/{keeper}/task/{keeper}/children").read_bytes().split()
    return [*open_files, len(children), Path(f"/proc/{template}/mountinfo").read_bytes().count(b"\n")]


def parent_of(pid: int) -> int:
    """Host id of a process's parent."""
    return int(proc_files.field_of(proc_files.read(f"/proc/{pid}/status"), b"PPid"))
