"""Attacks on kernel objects that sandboxes share with the host and each other (N9, N10, K11 to K22)."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from sandbox_attempts import SURFACE, Attempts, assert_refused, attempts_with, value_of
from sandbox_lab import EPILOGUE, PREAMBLE, answer, as_other_user, lab
from waiting import WAIT_SECONDS

from nekro.sandbox.drivers.bwrap import BwrapDriver
from nekro.sandbox.drivers.bwrap_args import VISIBLE_PROC

pytestmark = pytest.mark.usefixtures("x86_64")


@pytest.fixture(scope="module", params=["own", "other"], ids=["own_user", "ordinary_user"])
def tried(request: pytest.FixtureRequest, found_by_driver: dict[str, object]) -> Attempts:
    """Every attempt, as the code of a service of this process's user and, from root, of an ordinary one."""
    code = {"code": PREAMBLE + SURFACE + EPILOGUE}
    if request.param == "other":
        request.getfixturevalue("other_user")
        result = as_other_user(code)
    else:
        result = asyncio.run(answer(code))
    assert result["reports"], result
    attempts: Attempts = json.loads(result["reports"][0])
    return attempts


def test_attack_N9_no_out_of_band_data(tried: Attempts) -> None:
    assert_refused(attempts_with(tried, "N9"), by={"ENOTSUP"})


def test_attack_N10_no_programs_and_no_rare_options_on_sockets(tried: Attempts) -> None:
    assert_refused(attempts_with(tried, "N10"), by={"ENOPROTOOPT"})


def test_attack_K11_no_watch_on_files_of_the_host(tried: Attempts) -> None:
    assert_refused(attempts_with(tried, "K11"), by={"ENOSYS", "EINVAL"})


def test_attack_K13_no_lease_and_no_lock_of_an_open_file(tried: Attempts) -> None:
    assert_refused(attempts_with(tried, "K13"), by={"ENOSYS", "EINVAL"})


def test_attack_K14_unlisted_system_calls_do_not_exist(tried: Attempts) -> None:
    assert_refused(attempts_with(tried, "K14"), by={"ENOSYS"})


def test_attack_K15_no_handle_on_a_process_and_no_filter_of_its_own(tried: Attempts) -> None:
    assert_refused(attempts_with(tried, "K15"), by={"ENOSYS", "EINVAL"})


def test_attack_K16_page_cache_of_shared_files_cannot_be_probed_or_emptied(tried: Attempts) -> None:
    attempts = attempts_with(tried, "K16")
    # Returns success without an effect: the advice may be ignored.
    assert value_of(attempts, "K16 drop a file's pages") is None
    del attempts["K16 drop a file's pages"]
    assert_refused(attempts, by={"ENOSYS", "EINVAL", "ENOTSUP"})


def test_attack_K17_no_huge_pages(tried: Attempts) -> None:
    assert value_of(tried, "K17 ordinary pages") == 4096
    refused = {label: o for label, o in attempts_with(tried, "K17").items() if "ordinary" not in label}
    # ENOSYS: the strict filter has no memory files at all.
    assert_refused(refused, by={"EINVAL", "ENOMEM", "ENOSYS"})


def test_attack_K18_no_request_to_devices_file_systems_and_interfaces(tried: Attempts) -> None:
    assert value_of(tried, "K18 size of the terminal") == "ENOTTY"
    refused = {label: o for label, o in attempts_with(tried, "K18").items() if "terminal" not in label}
    assert_refused(refused, by={"ENOTTY"})


def test_attack_K19_no_kernel_objects_outside_of_descriptors_and_memory(tried: Attempts) -> None:
    assert_refused(attempts_with(tried, "K19"), by={"ENOSYS"})


def test_attack_K20_a_process_cannot_hide_or_rename_its_memory(tried: Attempts) -> None:
    assert_refused(attempts_with(tried, "K20"), by={"EINVAL"})


def test_attack_K21_nothing_of_proc_but_what_libraries_need(tried: Attempts) -> None:
    readable = set(value_of(tried, "K21 readable"))
    assert {"cpuinfo", "meminfo", "stat", "self"} <= readable <= VISIBLE_PROC
    for name in ("config.gz", "diskstats", "pressure/cpu", "interrupts", "vmstat", "locks"):
        if Path("/proc", name).exists():
            assert tried[f"K21 read {name}"][0] == "refused", name


def test_attack_K21_no_counter_of_the_host_in_its_settings(tried: Attempts) -> None:
    assert_refused(attempts_with(tried, "K21 setting"), by={"ENOENT"})


def test_attack_K22_no_data_in_extended_attributes(tried: Attempts) -> None:
    assert_refused(attempts_with(tried, "K22"), by={"ENOTSUP"})


LOCK = """
import errno, fcntl, os
def say(action):
    try:
        action()
    except OSError as exc:
        return errno.errorcode[exc.errno]
    return "done"
file = open("/usr/bin/env", "rb")
first = say(lambda: fcntl.flock(file, fcntl.LOCK_{kind} | fcntl.LOCK_NB))
meet("{kind}")
report(["{kind}", first, say(lambda: fcntl.flock(file, fcntl.LOCK_{kind} | fcntl.LOCK_NB))])
meet("{kind}")
"""


async def test_attack_K12_two_sandboxes_cannot_communicate_by_flock(
    bwrap_driver: BwrapDriver, tmp_path: Path
) -> None:
    """One locks a file of the host that both see, the other tests the lock; then the other way round."""
    async with lab(tmp_path, use=bwrap_driver) as box:
        barrier = asyncio.Barrier(2)

        async def meet(_: str) -> None:
            async with asyncio.timeout(WAIT_SECONDS):
                await barrier.wait()

        box.handlers["meet"] = meet
        await asyncio.gather(
            box.run(LOCK.format(kind="EX"), chat_key="one"), box.run(LOCK.format(kind="SH"), chat_key="two")
        )
    assert sorted(box.reports) == [["EX", "ENOSYS", "ENOSYS"], ["SH", "ENOSYS", "ENOSYS"]]


RECORD_LOCK = """
import fcntl, os
file = open("/app/shared/file", "w+b")
fcntl.lockf(file, fcntl.LOCK_EX, 1)
if os.fork() == 0:
    try:
        fcntl.lockf(open("/app/shared/file", "r+b"), fcntl.LOCK_EX | fcntl.LOCK_NB, 1)
    except BlockingIOError:
        os._exit(7)
    os._exit(0)
print(os.waitstatus_to_exitcode(os.wait()[1]))
try:
    fcntl.lockf(open("/usr/bin/env", "rb"), fcntl.LOCK_EX | fcntl.LOCK_NB)
except OSError as exc:
    print(exc.errno == 9)
"""


async def test_record_locks_work_between_processes_of_one_sandbox(
    bwrap_driver: BwrapDriver, tmp_path: Path
) -> None:
    """sqlite needs them; a lock on a file of the host would block others."""
    async with lab(tmp_path, use=bwrap_driver) as box:
        result = await box.run(RECORD_LOCK)
    assert result.output.split() == ["7", "True"], result


async def test_own_files_of_proc_stay_readable(bwrap_driver: BwrapDriver, tmp_path: Path) -> None:
    code = """
import os
for name in ("self/status", "self/maps", "self/mountinfo", "thread-self/comm", "net/unix", "cpuinfo",
             "sys/kernel/osrelease", "sys/vm/overcommit_memory", "sys/net/core/somaxconn"):
    assert open("/proc/" + name).read(), name
print(os.getloadavg() >= (0, 0, 0), os.sysconf("SC_NPROCESSORS_ONLN") > 0)
"""
    async with lab(tmp_path, use=bwrap_driver) as box:
        result = await box.run(code)
    assert result.output == "True True\n", result
