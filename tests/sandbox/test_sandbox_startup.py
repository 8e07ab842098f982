"""Reasons why a sandbox cannot start (U of the attack list): always a refusal with reason and fix."""

from __future__ import annotations

import json
import os
import platform
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from sandbox_lab import REPOSITORY, Areas, lab
from waiting import WAIT_SECONDS

from broker_config.settings import SandboxSettings
from nekro.sandbox.driver import SandboxSpec
from nekro.sandbox.drivers.bwrap import BwrapDriver
from nekro.sandbox.drivers.isolated import explain_start_failure, verify_isolation
from nekro.sandbox.drivers.selection import build_driver, describe, probe
from nekro.sandbox.drivers.supervised import UNSAFE_SWITCH
from nekro.sandbox.filter.seccomp import build_filter
from nekro.sandbox.interpreter import Access, find_interpreter
from nekro.sandbox.manager import SandboxManager
from nekro.sandbox.models import RunRequest, StopType, StubCall, StubResult
from nekro.sandbox.run import SandboxRun
from nekro_agent.errors import SandboxError, SandboxUnavailableError


def program(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(0o755)
    return path


async def refusal(driver: BwrapDriver) -> str:
    """Reasons why a driver cannot be used; starting a sandbox must fail as well."""
    capability = await probe(driver, SandboxSettings())
    assert not capability.ok
    with pytest.raises(SandboxUnavailableError):
        await driver.start(SandboxSpec(shared_dir=Path("/"), uploads_dir=Path("/"), uid=1))
    return "; ".join(capability.reasons)


async def test_probe_runs_a_real_sandbox(bwrap_driver: BwrapDriver) -> None:
    capability = await probe(bwrap_driver, SandboxSettings())
    assert capability.ok, capability.reasons
    checks = {check.name: check for check in capability.checks}
    assert checks["sandbox run"].detail.startswith("code ran in")
    assert {"bubblewrap", "interpreter", "seccomp", "control groups", "network"} <= set(checks)


@pytest.mark.slow
def test_doctor_prints_the_isolation_of_this_machine_line_by_line(
    bwrap_driver: BwrapDriver, tmp_path: Path
) -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "from nekro.cli.main import main; raise SystemExit(main())",
            "doctor",
            "--json",
        ],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "NEKRO_DATA_DIR": str(tmp_path / "data")},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=WAIT_SECONDS,
        check=False,
    )
    lines = {check["name"]: check for check in json.loads(done.stdout)}
    isolation = {name.removeprefix("sandbox ") for name in lines if name.startswith("sandbox ")}
    limits = {name.removeprefix("limit ") for name in isolation if name.startswith("limit ")}
    assert limits == {"memory", "swap", "pids", "cpu", "disk", "inodes", "file_size", "wall", "output"}
    isolation -= {f"limit {name}" for name in limits}
    assert isolation == {
        "bubblewrap",
        "interpreter",
        "seccomp",
        "control groups",
        "fork server",
        "network",
        "packages",
        "run",
    }
    assert lines["sandbox limit disk"]["detail"].startswith("polled: ")
    assert "NEKRO_SANDBOX__SHARED_STORAGE" in lines["sandbox limit disk"]["fix"]
    mode = "root mode" if os.geteuid() == 0 else "user mode"
    assert mode in lines["sandbox bubblewrap"]["detail"]
    assert lines["sandbox run"]["detail"].startswith("code ran in")
    groups = lines["sandbox control groups"]
    assert lines["sandbox limit wall"]["detail"].startswith("host: ")
    assert "bounds memory" in groups["detail"] or "Delegate=yes" in groups["fix"]


async def test_description_never_raises_and_names_missing_requirements(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    capability = await describe(SandboxSettings())
    assert not capability.ok
    assert "bubblewrap is not installed" in capability.reasons[0]


async def test_attack_U1_missing_bubblewrap_is_refused_with_the_package_to_install(tmp_path: Path) -> None:
    assert "install it (Debian: apt install bubblewrap)" in await refusal(
        BwrapDriver(SandboxSettings(), search_path=str(tmp_path))
    )


@pytest.mark.extended
@pytest.mark.usefixtures("own_packages")
async def test_attack_U2_denied_namespaces_are_refused_with_the_fix(
    bwrap_driver: BwrapDriver, tmp_path: Path
) -> None:
    """Our own driver, started inside our own sandbox, which denies namespaces."""
    settings = SandboxSettings(python=Path(sys.executable), memory_bytes=1 << 30)
    driver = BwrapDriver(settings)
    areas = Areas(root=tmp_path)
    spec = SandboxSpec(
        shared_dir=areas.shared_dir("box"),
        uploads_dir=areas.uploads_dir("chat"),
        uid=settings.uid_range_start,
        layers=(REPOSITORY,),
    )
    code = """
import asyncio, os
os.environ["NO_COLOR"] = "1"
from broker_config.settings import SandboxSettings
from nekro.sandbox.drivers.bwrap import BwrapDriver
from nekro.sandbox.drivers.selection import probe
print(asyncio.run(probe(BwrapDriver(SandboxSettings()), SandboxSettings())).reasons)
"""
    request = RunRequest(
        run_id="u2", chat_key="c", container_key="b", code=code, methods=(), dispatch=_no_call
    )
    sandbox = await driver.start(spec)
    run = SandboxRun(sandbox, request, settings=settings, driver="bwrap")
    result = await run.execute(methods={}, dispatch=_no_call)
    assert result.stop_type is StopType.NORMAL, result.output
    assert "bubblewrap could not start a sandbox" in result.output
    assert "user.max_user_namespaces" in result.output or "NEKRO_SANDBOX__DRIVER=container" in result.output


async def _no_call(call: StubCall) -> StubResult:
    pytest.fail(f"nothing is called here, but {call.token} was")


async def test_attack_U3_setuid_bubblewrap_is_refused(bwrap_driver: BwrapDriver, tmp_path: Path) -> None:
    copy = tmp_path / "bwrap"
    shutil.copy(bwrap_driver.tools.bwrap, copy)
    copy.chmod(0o755 | stat.S_ISUID)
    assert "is setuid; remove the bit" in await refusal(
        BwrapDriver(SandboxSettings(), search_path=str(tmp_path))
    )


@pytest.mark.parametrize(
    ("version", "words"), [("bubblewrap 0.4.1", "is version 0.4.1"), ("what?", "does not print")]
)
async def test_attack_U4_old_bubblewrap_is_refused(tmp_path: Path, version: str, words: str) -> None:
    program(tmp_path / "bwrap", f"#!/bin/sh\necho '{version}'\n")
    reasons = await refusal(BwrapDriver(SandboxSettings(), search_path=f"{tmp_path}:/usr/bin:/bin"))
    assert words in reasons
    assert "install bubblewrap 0.8 or newer" in reasons


async def test_error_of_bubblewrap_is_quoted_with_its_meaning(tmp_path: Path) -> None:
    words = "bwrap: setting up uid map: Permission denied"
    program(
        tmp_path / "bwrap",
        "#!/bin/sh\ncase $1 in --version) echo 'bubblewrap 0.9.0';; --help) ;;"
        f" *) echo '{words}'; exit 1;; esac\n",
    )
    reasons = await refusal(BwrapDriver(SandboxSettings(), search_path=f"{tmp_path}:/usr/bin:/bin"))
    assert words in reasons
    assert "AppArmor" in reasons


@pytest.mark.parametrize(
    ("message", "fix"),
    [
        ("bwrap: No permissions to create new namespace", "unprivileged_userns_clone"),
        (
            "bwrap: Creating new namespace failed: nesting depth or max_*_namespaces exceeded",
            "max_user_namespaces",
        ),
        ("bwrap: loopback: Failed RTM_NEWADDR: Operation not permitted", "AppArmor"),
        ("bwrap: Can't mount proc on /newroot/proc: Operation not permitted", "systempaths=unconfined"),
        ("bwrap: Failed to make / slave: Permission denied", "CAP_SYS_ADMIN"),
        ("bwrap: Unknown option --disable-userns", "0.8"),
        ("bwrap: execvp /opt/python/bin/python3: No such file or directory", "NEKRO_SANDBOX__PYTHON"),
    ],
)
def test_known_messages_have_a_fix(message: str, fix: str) -> None:
    assert fix in explain_start_failure(message)


@pytest.mark.root
async def test_missing_setpriv_is_refused_in_root_mode(bwrap_driver: BwrapDriver, tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("setpriv is needed in root mode only")
    (tmp_path / "bwrap").symlink_to(bwrap_driver.tools.bwrap)
    reasons = await refusal(BwrapDriver(SandboxSettings(), search_path=str(tmp_path)))
    assert "setpriv is not installed" in reasons


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "cannot be used as the sandbox's Python"),
        ("#!/bin/sh\nexit 1\n", "cannot be used as the sandbox's Python"),
        (
            '#!/bin/sh\necho \'{"version": [3, 9], "executable": "/x", "prefix": "/", "site": []}\'\n',
            "the sandbox needs 3.11 or newer",
        ),
    ],
    ids=["missing", "failing", "too old"],
)
async def test_attack_U5_unusable_interpreter_is_refused(
    tmp_path: Path, text: str | None, words: str
) -> None:
    path = tmp_path / "python"
    if text is not None:
        program(path, text)
    reasons = await refusal(BwrapDriver(SandboxSettings(python=path)))
    assert words in reasons
    assert "NEKRO_SANDBOX__PYTHON" in reasons


@pytest.mark.root
def test_attack_U5_interpreter_inaccessible_to_the_codes_user_is_refused(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only in root mode the code's user is another one")
    home = tmp_path / "installation"
    (home / "bin").mkdir(parents=True)
    home.chmod(0o700)
    answer = f'{{"version": [3, 11], "executable": "{home}/bin/python", "prefix": "{home}", "site": []}}'
    program(home / "bin" / "python", f"#!/bin/sh\necho '{answer}'\n")
    for access in (Access.BOUND, Access.BY_PATH):
        with pytest.raises(SandboxUnavailableError, match="not readable for others"):
            find_interpreter(home / "bin" / "python", access=access)
    assert find_interpreter(home / "bin" / "python", access=Access.OWN).version == (3, 11)


def test_interpreter_below_roots_home_falls_back_to_the_systems(monkeypatch: pytest.MonkeyPatch) -> None:
    if not Path("/usr/bin/python3").exists():
        pytest.skip("needs a system Python")
    monkeypatch.setattr(sys, "_base_executable", "/nonexistent/python")
    found = find_interpreter(None, access=Access.BY_PATH)
    assert found.prefix == Path("/usr")
    assert "using /usr/bin/python3 instead" in found.note


async def test_attack_U6_unknown_architecture_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    reasons = await refusal(BwrapDriver(SandboxSettings()))
    assert "no seccomp filter for riscv64" in reasons
    with pytest.raises(SandboxUnavailableError, match="use x86_64 or aarch64"):
        build_filter("mips", strict_memory=True)


PROBE = """
import asyncio
from broker_config.settings import SandboxSettings
from nekro.sandbox.drivers.selection import build_driver
from nekro.sandbox.drivers.selection import probe
settings = SandboxSettings()
print("; ".join(asyncio.run(probe(build_driver(settings), settings)).reasons) or "no reason")
"""


@pytest.mark.extended
@pytest.mark.root
def test_attack_U8_service_that_may_not_inspect_sandboxes_is_refused_at_the_start(
    bwrap_driver: BwrapDriver,
) -> None:
    """Root of a container usually lacks this capability; the guards would end every run of 0.1 s."""
    if os.geteuid() != 0:
        pytest.skip("an ordinary user may look at what its own user namespace holds")
    without = ["setpriv", "--bounding-set", "-sys_ptrace", "--inh-caps", "-sys_ptrace"]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    reasons = [
        subprocess.run(
            [*prefix, sys.executable, "-c", PROBE],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for prefix in ([], without)
    ]
    assert reasons[0] == "no reason\n"
    assert "cannot be read" in reasons[1]
    assert "CAP_SYS_PTRACE" in reasons[1]


@pytest.mark.parametrize("value", [None, "0", "yes"])
async def test_attack_U7_unsafe_driver_needs_its_second_switch(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, value: str | None
) -> None:
    monkeypatch.delenv(UNSAFE_SWITCH, raising=False)
    if value is not None:
        monkeypatch.setenv(UNSAFE_SWITCH, value)
    settings = SandboxSettings(driver="unsafe")
    with pytest.raises(SandboxUnavailableError, match="second switch"):
        await SandboxManager(settings, Areas(root=tmp_path)).start()
    # The manager's choice needs it as well.
    async with lab(tmp_path, use=build_driver(settings)) as box:
        with pytest.raises(SandboxUnavailableError, match=UNSAFE_SWITCH):
            await box.run("print(1)")


async def test_no_driver_means_no_run_and_no_fallback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    manager = SandboxManager(SandboxSettings(), Areas(root=tmp_path))
    with pytest.raises(SandboxUnavailableError, match="bubblewrap is not installed"):
        await manager.start()
    with pytest.raises(SandboxError, match="has not been started"):
        await manager.run(
            RunRequest(run_id="r", chat_key="c", container_key="b", code="", methods=(), dispatch=_no_call)
        )
    await manager.close()


@pytest.mark.parametrize("uid", [0, 12345])
def test_unconfined_process_is_detected(uid: int) -> None:
    with pytest.raises(SandboxUnavailableError, match=r"the sandbox is not isolated: .*no seccomp filter"):
        verify_isolation(os.getpid(), uid=uid, parent=os.getppid())


async def test_broken_runner_is_reported_with_its_output(bwrap_driver: BwrapDriver, tmp_path: Path) -> None:
    broken = BwrapDriver(SandboxSettings(fork_server=False))
    broken.__dict__["_runner"] = b"raise SystemExit('the runner is broken')"
    async with lab(tmp_path, use=broken) as box:
        with pytest.raises(SandboxUnavailableError, match="the runner is broken"):
            await box.run("print(1)")


async def test_failed_preload_is_printed_and_the_code_runs(tmp_path: Path) -> None:
    async with lab(tmp_path, preload=["json", "no_such_module"], fork_server=False) as box:
        result = await box.run("print('ran')")
    assert "preloading no_such_module failed" in result.output
    assert result.output.endswith("ran\n")
