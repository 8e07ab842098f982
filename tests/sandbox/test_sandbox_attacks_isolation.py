"""Attacks on the isolation: files, network and kernel (F7 to F10, N, K of the attack list), in both modes."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from sandbox_attempts import (
    FILES,
    KERNEL,
    NETWORK,
    Attempts,
    assert_refused,
    attempts_with,
    value_of,
)
from sandbox_lab import EPILOGUE, PREAMBLE, answer, as_other_user, lab

from nekro.sandbox.drivers.bwrap import BwrapDriver

_FIELDS = {"host_secret", "other_chat", "port", "socket_path", "abstract", "outside"}


@pytest.fixture(scope="module")
def outside() -> Iterator[dict[str, str]]:
    """Existing objects on the host that code must not reach."""
    with tempfile.TemporaryDirectory(prefix="nekro-outside-") as name:
        directory = Path(name)
        directory.chmod(0o755)
        (directory / "secret.txt").write_text("host secret")
        (directory / "other").mkdir()
        listener = socket.create_server(("127.0.0.1", 0))
        by_path, abstract = socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX)
        by_path.bind(str(directory / "redis.sock"))
        (directory / "redis.sock").chmod(0o777)
        abstract.bind(f"\0nekro-{os.getpid()}")
        for sock in (by_path, abstract):
            sock.listen()
        yield {
            "host_secret": str(directory / "secret.txt"),
            "other_chat": str(directory / "other"),
            "port": str(listener.getsockname()[1]),
            "socket_path": str(directory / "redis.sock"),
            "abstract": f"nekro-{os.getpid()}",
            "outside": str(os.getpid()),
        }
        for sock in (listener, by_path, abstract):
            sock.close()


@pytest.fixture(scope="module", params=["own", "other"], ids=["own_user", "ordinary_user"])
def mode(request: pytest.FixtureRequest, found_by_driver: dict[str, object]) -> str:
    """Whether the service runs as this process's user or, from root, as an ordinary one."""
    return str(request.param)


@pytest.fixture(scope="module")
def tried(outside: dict[str, str], mode: str, request: pytest.FixtureRequest) -> dict[str, Attempts]:
    """Every group, tried once per mode."""
    if mode == "other":
        request.getfixturevalue("other_user")
    groups = {"files": FILES, "network": NETWORK, "kernel": KERNEL}
    return {name: _try(code, outside, mode) for name, code in groups.items()}


def _try(code: str, outside: dict[str, str], mode: str) -> Attempts:
    for field in _FIELDS:
        code = code.replace("{" + field + "}", outside[field])
    request = {"code": PREAMBLE + code + EPILOGUE}
    result = asyncio.run(answer(request)) if mode == "own" else as_other_user(request)
    assert result["reports"], result
    attempts: Attempts = json.loads(result["reports"][0])
    return attempts


@pytest.mark.usefixtures("x86_64")
class TestFiles:
    def test_attack_F7_only_shared_and_tmp_are_writable(self, tried: dict[str, Attempts]) -> None:
        refusals = {"EROFS", "EACCES", "EXDEV", "EPERM", "ENOENT", "EBUSY"}
        assert_refused(attempts_with(tried["files"], "F7"), by=refusals)

    def test_attack_F8_no_way_to_a_setuid_or_setgid_bit(self, tried: dict[str, Attempts]) -> None:
        files = dict(tried["files"])
        assert value_of(files, "F8 mkdir has no set-id bits") == 0
        assert value_of(files, "F8 plain has no set-id bits") == 0
        ways = {
            label: outcome for label, outcome in attempts_with(files, "F8").items() if "has no" not in label
        }
        assert_refused(ways, by={"EPERM", "ENOSYS"})

    def test_attack_F9_no_device_fifo_or_change_of_owner(self, tried: dict[str, Attempts]) -> None:
        # EINVAL: the user namespace does not map the other owner.
        assert_refused(attempts_with(tried["files"], "F9"), by={"EPERM", "EINVAL"})

    def test_attack_F10_files_of_the_host_and_of_other_chats_do_not_exist(
        self, tried: dict[str, Attempts]
    ) -> None:
        assert_refused(attempts_with(tried["files"], "F10 see"), by={"ENOENT", "EACCES"})
        top = set(value_of(tried["files"], "F10 what is at the top"))
        assert top <= {
            "app",
            "bin",
            "dev",
            "etc",
            "lib",
            "lib32",
            "lib64",
            "libx32",
            "opt",
            "proc",
            "sbin",
            "tmp",
            "usr",
        }
        assert value_of(tried["files"], "F10 what is in app") == ["shared", "uploads"]


@pytest.mark.usefixtures("x86_64")
class TestNetwork:
    def test_attack_N1_no_address_can_be_reached(self, tried: dict[str, Attempts]) -> None:
        assert_refused(attempts_with(tried["network"], "N1"))

    def test_attack_N2_unix_socket_of_the_host_does_not_exist(self, tried: dict[str, Attempts]) -> None:
        assert_refused(attempts_with(tried["network"], "N2"), by={"ENOENT"})

    def test_attack_N3_abstract_unix_socket_of_the_host_is_refused(self, tried: dict[str, Attempts]) -> None:
        assert_refused(attempts_with(tried["network"], "N3"), by={"ECONNREFUSED"})

    def test_attack_N4_other_socket_families_cannot_be_made(self, tried: dict[str, Attempts]) -> None:
        assert_refused(attempts_with(tried["network"], "N4"), by={"EAFNOSUPPORT"})

    def test_attack_N5_container_engine_sockets_do_not_exist(self, tried: dict[str, Attempts]) -> None:
        assert_refused(attempts_with(tried["network"], "N5"), by={"ENOENT"})

    def test_attack_N6_no_descriptor_but_the_standard_ones_and_the_channel(
        self, tried: dict[str, Attempts]
    ) -> None:
        assert value_of(tried["network"], "N6 descriptors") == [0, 1, 2, 3]
        # Of a forked run, the first process belongs to another user.
        first = tried["network"]["N6 descriptors of the first process"]
        assert first[0] == "refused" or value_of(tried["network"], "N6 descriptors of the first process") == [
            "0",
            "1",
            "2",
        ]

    def test_attack_N7_no_proxy_settings_are_inherited(self, tried: dict[str, Attempts]) -> None:
        assert value_of(tried["network"], "N7 proxies") == []

    def test_attack_N8_ordinary_libraries_still_work(self, tried: dict[str, Attempts]) -> None:
        network = tried["network"]
        assert value_of(network, "N8 asyncio") == b"5\n"
        assert value_of(network, "N8 socketpair") == b"x"
        assert value_of(network, "N8 multiprocessing") == [1, 2]
        assert value_of(network, "N8 threads") == list(range(8))
        assert value_of(network, "N8 sqlite") == [(1,)]


@pytest.mark.usefixtures("x86_64")
class TestKernel:
    def test_attack_K1_namespaces_and_mounts(self, tried: dict[str, Attempts]) -> None:
        assert_refused(attempts_with(tried["kernel"], "K1"), by={"EPERM", "ENOSYS"})

    def test_attack_K2_other_processes_memory(self, tried: dict[str, Attempts]) -> None:
        assert_refused(attempts_with(tried["kernel"], "K2"), by={"EPERM", "ENOSYS"})

    def test_attack_K3_dangerous_system_calls(self, tried: dict[str, Attempts]) -> None:
        assert_refused(attempts_with(tried["kernel"], "K3"), by={"EPERM", "ENOSYS"})

    def test_attack_K4_terminal_injection(self, tried: dict[str, Attempts]) -> None:
        assert_refused(attempts_with(tried["kernel"], "K4"), by={"EPERM"})

    def test_attack_K5_other_entries_to_the_kernel_kill_the_caller(self, tried: dict[str, Attempts]) -> None:
        for label in ("K5 x32 entry", "K5 i386 entry"):
            assert value_of(tried["kernel"], label) == -31, label  # SIGSYS

    def test_attack_K6_kernel_knobs_cannot_be_written(self, tried: dict[str, Attempts]) -> None:
        assert_refused(attempts_with(tried["kernel"], "K6"))

    def test_attack_K8_no_process_outside_is_visible(self, tried: dict[str, Attempts]) -> None:
        kernel = tried["kernel"]
        assert set(value_of(kernel, "K8 processes")) == {1, 2}
        assert kernel["K8 kill outside"][2] == "ESRCH"
        # The first process ignores signals of its own namespace, or belongs to another user; had it died,
        # there would be no report.
        outcome = kernel["K8 kill the first process"]
        assert outcome[0] == "done" or outcome[2] == "EPERM"

    def test_attack_K9_nothing_reveals_the_service(
        self, tried: dict[str, Attempts], outside: dict[str, str]
    ) -> None:
        kernel = tried["kernel"]
        names = {
            "HOME",
            "LANG",
            "LOGNAME",
            "MALLOC_ARENA_MAX",
            "MPLCONFIGDIR",
            "OPENBLAS_NUM_THREADS",
            "PATH",
        }
        names |= {"PWD", "PYTHONDONTWRITEBYTECODE", "PYTHONHASHSEED", "TMPDIR", "LD_LIBRARY_PATH"}
        assert set(value_of(kernel, "K9 environment")) <= names
        command = value_of(kernel, "K9 command line of the first process")
        assert b"/opt/sandbox/runner.py" in command
        assert os.getcwd().encode() not in command
        for label in ("/proc/cmdline", "/proc/kallsyms", "/proc/keys", "/proc/timer_list"):
            outcome = kernel[f"K9 {label}"]
            assert outcome[0] == "refused" or outcome[1] == "''", (label, outcome)
        assert kernel["K9 kernel messages"][0] == "refused"

    def test_attack_K10_no_privilege_is_left(self, tried: dict[str, Attempts]) -> None:
        status = json.loads(value_of(tried["kernel"], "K10 status"))
        for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"):
            assert int(status[name], 16) == 0, name
        assert (status["NoNewPrivs"], status["Seccomp"]) == ("1", "2")
        attempts = attempts_with(tried["kernel"], "K10")
        del attempts["K10 status"]
        assert_refused(attempts)


async def test_attack_K7_host_user_is_neither_root_nor_in_root_mode_the_services(
    bwrap_driver: BwrapDriver, tmp_path: Path
) -> None:
    seen: list[set[int]] = []
    async with lab(tmp_path, use=bwrap_driver) as box:

        def look() -> None:
            (run,) = box.manager._running.values()
            pids = run._sandbox.processes()
            assert len(pids) in (2, 3)  # that of a forked run leaves out the first process
            first = run._sandbox.first_pid
            seen.append({Path("/proc", str(pid)).stat().st_uid for pid in pids if pid != first})
            assert Path("/proc", str(first)).stat().st_uid != 0

        box.handlers["look"] = look
        await box.run("import os, time\nif os.fork() == 0:\n    time.sleep(30)\nlook()\nos.kill(0, 9)")
    (users,) = seen
    assert 0 not in users
    if os.geteuid() == 0:
        start = box.settings.uid_range_start
        assert users <= set(range(start, start + 10_000))
        assert len(users) == 1
    else:
        assert users == {os.geteuid()}


async def test_attack_K9_secrets_in_the_services_environment_do_not_enter(
    bwrap_driver: BwrapDriver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NEKRO_TEST_SECRET", "s3cr3t-value")
    code = """
import glob
for path in glob.glob("/proc/*/environ") + glob.glob("/proc/*/cmdline"):
    try:
        print(open(path, "rb").read())
    except OSError:
        pass
"""
    async with lab(tmp_path, use=bwrap_driver) as box:
        result = await box.run(code)
    assert "s3cr3t-value" not in result.output
    assert "/opt/sandbox/runner.py" in result.output
