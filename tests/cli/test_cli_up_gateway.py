"""Commands beside a `nekro up` that serves the API: they ask it, unless it does not answer."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from nekro_shell import Shell, open_shell
from test_cli_imports import imported_by
from waiting import WAIT_SECONDS, wait_until

from nekro.cli.gateway_client import gateway_of_up
from nekro.cli.services.ownership import read_running

pytestmark = pytest.mark.extended

SCRIPT = """
- when: 'good day'
  answer: "```python\\nsend_msg_text(_ck, 'Good day to you')\\n```"
"""


@pytest.fixture(scope="module")
def shell() -> Iterator[Shell]:
    with open_shell({}) as shell:
        script = shell.directory / "script.yaml"
        script.write_text(SCRIPT, "utf-8")
        shell.environment["NEKRO_LLM__SCRIPT"] = str(script)
        up = shell.start("up")
        try:
            wait_until(lambda: read_running(shell.data_dir), what="nekro up")
            assert shell("send", "asked", "good day", "--wait").code == 0  # the chat of several tests
            yield shell
        finally:
            up.send_signal(signal.SIGINT)
            up.communicate(timeout=WAIT_SECONDS)


def imports_of(shell: Shell, *arguments: str) -> set[str]:
    return imported_by(list(arguments), environ=shell.environment, directory=shell.directory)


def gateway_pid(shell: Shell) -> int:
    running = read_running(shell.data_dir)
    assert running is not None
    children = Path(f"/proc/{running.pid}/task/{running.pid}/children").read_text().split()
    (pid,) = (int(pid) for pid in children if Path(f"/proc/{pid}/comm").read_text() == "gateway\n")
    return pid


@pytest.mark.parametrize(
    "arguments",
    [
        ("jobs",),
        ("timers",),
        ("keys",),
        ("costs",),
        ("send", "asked", "good day", "--wait"),
        ("history", "asked", "--trace"),
        ("cancel", "asked"),
        ("approvals",),
        ("dead",),
    ],
)
def test_a_command_asks_the_gateway_instead_of_the_database(shell: Shell, arguments: tuple[str, ...]) -> None:
    def asks() -> bool:
        modules = imports_of(shell, *arguments)
        return "httpx" in modules and "sqlalchemy" not in modules

    # A gateway that does not answer for a second, as on a busy machine, is left out.
    wait_until(asks, what="a command that asks the gateway only")


def test_a_message_is_answered_and_a_stated_channel_is_recorded(shell: Shell) -> None:
    done = shell("send", "talk", "good day", "--wait", NEKRO_KEY="nk_of_another_gateway")
    assert (done.code, done.out) == (0, "Good day to you\n"), done.err
    assert shell("send", "talk", "good day", "--overheard", "--channel-name", "Friends").code == 0


def test_a_conversation_goes_over_the_gateway(shell: Shell) -> None:
    done = shell("chat", "--chat-key", "spoken", given="what now?\ngood day\n")
    assert (done.code, done.out) == (0, "Good day to you\n"), done.err
    assert "error: the turn failed in round 1" in done.err


def test_a_gateway_that_does_not_answer_does_not_take_commands_along(shell: Shell) -> None:
    pid = gateway_pid(shell)
    os.kill(pid, signal.SIGSTOP)
    try:
        modules = imports_of(shell, "jobs")
        assert "httpx" not in modules and "sqlalchemy" in modules
        assert shell("send", "talk", "good day", "--wait").out == "Good day to you\n"
    finally:
        os.kill(pid, signal.SIGCONT)
    os.kill(pid, signal.SIGKILL)
    assert shell("jobs").code == 0


def test_a_system_that_the_settings_name_is_not_that_of_the_data_directory(shell: Shell) -> None:
    from broker_config.settings import Settings

    def settings(**groups: object) -> Settings:
        return Settings(data_dir=shell.data_dir, **groups)  # type: ignore[arg-type]

    wait_until(lambda: gateway_of_up(settings()), what="the gateway")
    assert gateway_of_up(settings(), ("pinned",)) is None  # type: ignore[arg-type]
    assert gateway_of_up(settings(broker={"url": "redis://127.0.0.1:1"})) is None
    assert gateway_of_up(settings(database={"url": "sqlite:///other.db"})) is None
