"""Every shell block of the README and its plugin run as written."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from quick_nekro import quick_nekro
from redis_process import free_port
from waiting import WAIT_SECONDS

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text("utf-8")
#: The two commands of a fresh clone: the tour has its own test, and the other command is this suite.
TWO_COMMANDS = {"make demo\n", "make test\n"}


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def block_with(text: str) -> str:
    (found,) = (block for block in blocks("bash") if text in block)
    return found


@pytest.fixture(scope="module")
def nekro() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="nkread") as name, quick_nekro(Path(name)) as command:
        yield command


@pytest.fixture
def folder(tmp_path: Path, nekro: Path) -> Path:
    """A folder like a fresh clone: ``.venv/bin`` with ``nekro`` in it."""
    bin_ = tmp_path / ".venv" / "bin"
    bin_.mkdir(parents=True)
    (bin_ / "nekro").symlink_to(nekro)
    return tmp_path


@pytest.fixture
def environment(folder: Path) -> dict[str, str]:
    """No settings of the environment; ``nekro`` is on PATH as after an installation."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("NEKRO_")}
    return kept | {"PATH": f"{folder / '.venv' / 'bin'}:{kept['PATH']}"}


@pytest.mark.parametrize("language", ["zh", "ja"])
def test_translations_show_the_same_blocks(language: str) -> None:
    fences = re.compile(r"```.*?```", re.DOTALL)
    translated = (ROOT / f"README.{language}.md").read_text("utf-8")
    assert fences.findall(translated) == fences.findall(README)


@pytest.mark.parametrize("page", sorted(ROOT.glob("*.md")) + sorted((ROOT / "docs").rglob("*.md")), ids=str)
def test_link_targets_exist(page: Path) -> None:
    links = re.findall(r"(?:\]\(|src=\")(?!https?:|#)([^)#\"]+)", page.read_text("utf-8"))
    assert [link for link in links if not (page.parent / link).exists()] == []


def run(block: str, folder: Path, environment: dict[str, str], **options: Any) -> str:
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", block],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=2.5 * WAIT_SECONDS, **options,
    )  # fmt: skip
    assert done.returncode == 0, f"{block}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def test_every_block_is_tested() -> None:
    """A new block of the README must be run here."""
    documented = {block for block in blocks("bash") if block not in TWO_COMMANDS}
    run_here = {
        block_with(text)
        for text in (
            "nekro methods",
            "shopping.py",
            "my_plugins",
            "nekro chat",
            "nekro worker",
            "nekro up",
            "make wheel",
        )
    }
    assert documented == run_here
    assert set(blocks("bash")) >= TWO_COMMANDS


@pytest.mark.extended
def test_the_link_of_nekro_up_logs_in_to_the_console(folder: Path, environment: dict[str, str]) -> None:
    port = str(free_port())
    up = subprocess.Popen(
        ["bash", "-euo", "pipefail", "-c", block_with("nekro up")],
        cwd=folder, env=environment | {"NEKRO_GATEWAY__PORT": port, "NEKRO_DATA_DIR": str(folder / "data")},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip
    assert up.stdout is not None
    try:
        said = ""
        while (found := re.search(r"console on (\S+)#/login\?code=(\S+)", said)) is None:
            line = up.stdout.readline()
            assert line, said
            said += line
        link, code = found.groups()
        assert httpx.get(link, timeout=WAIT_SECONDS).is_success
        session = link.removesuffix("/") + "/session"
        origin = {"Origin": f"http://127.0.0.1:{port}"}
        login = httpx.post(session, json={"key": code}, headers=origin, timeout=WAIT_SECONDS)
        assert login.status_code == 201, login.text
    finally:
        os.killpg(up.pid, signal.SIGINT)
        rest, _ = up.communicate(timeout=WAIT_SECONDS)
    assert "stopping" in rest


@pytest.mark.extended
def test_the_wheel_installs_as_documented(folder: Path, environment: dict[str, str]) -> None:
    """`make wheel` also tries it with its dependencies; here they are those of this environment."""
    build = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", folder / "dist"]
    subprocess.run(build, cwd=ROOT, capture_output=True, check=True)
    own = {
        "PIP_NO_INDEX": "1",
        "PIP_NO_DEPS": "1",
        "PYTHONPATH": sysconfig.get_path("purelib"),
        "NEKRO_DATA_DIR": str(folder / "data"),
    }
    (folder / ".venv" / "bin" / "python3").symlink_to(sys.executable)
    block = block_with("make wheel").replace("make wheel\n", "")
    said = run(block, folder, environment | own)
    assert "settings: read" in said
    assert list((folder / "nekro").glob("lib/python*/site-packages/nekro/cli/main.py"))


@pytest.mark.extended
def test_documented_method_calls_work(folder: Path, environment: dict[str, str]) -> None:
    said = run(block_with("nekro methods"), folder, environment)
    assert "save_note" in said and "milk and bread" in said


@pytest.mark.extended
def test_documented_file_execution_works(folder: Path, environment: dict[str, str]) -> None:
    # By interpreters; those of the other blocks are forked.
    command = folder / ".venv" / "bin" / "nekro"
    command.unlink()
    command.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -P -m nekro.cli.main "$@"\n')
    command.chmod(0o755)
    assert "Buy milk" in run(block_with("shopping.py"), folder, environment)


@pytest.mark.extended
def test_the_documented_plugin_works(folder: Path, environment: dict[str, str]) -> None:
    (plugin,) = blocks("python")
    (folder / "my_plugins").mkdir()
    (folder / "my_plugins" / "hello.py").write_text(plugin, "utf-8")
    said = run(block_with("my_plugins"), folder, environment)
    assert "you.hello" in said and "Hello, Ada!" in said


@pytest.mark.extended
async def test_the_documented_model_conversation_works(folder: Path, environment: dict[str, str]) -> None:
    import asyncio

    from chat_server import ChatServer, stream

    async with ChatServer([stream('```python\nsend_msg_text(_ck, "Good morning")\n```')]) as server:
        block = block_with("nekro chat").replace("http://127.0.0.1:8000/v1", server.base_url)
        said = await asyncio.to_thread(run, block, folder, environment, input="Hello\n")
    assert "Good morning" in said


@pytest.fixture
def fleet_services(own_redis: Any, postgres_server: Any) -> Iterator[dict[str, str]]:
    """Placeholders in the block, and their replacements."""
    yield {
        "redis://redis:6379/0": own_redis.url,
        "postgresql://nekro@db/nekro": postgres_server.create_database(),
        "KEY=...": "KEY=a-signing-key-of-this-test",
    }


@pytest.mark.extended
def test_the_documented_fleet_starts(
    folder: Path, environment: dict[str, str], fleet_services: dict[str, str]
) -> None:
    block = block_with("nekro worker")
    for documented, real in fleet_services.items():
        assert documented in block
        block = block.replace(documented, real)
    # The block's workers run until they are stopped: all at once, and until a call was answered.
    lines = [
        f"{line} >{n}.log 2>&1 &" if "nekro worker" in line else line
        for n, line in enumerate(block.splitlines())
    ]
    lines = [f"export NEKRO_DATA_DIR={folder / 'data'} NEKRO_LLM__SCRIPT={folder / 'script.yaml'}", *lines]
    lines += [
        "trap 'kill $(jobs -p); wait' EXIT",
        # A call waits some seconds for workers, which on a busy machine need more to start.
        "until nekro worker --check --lane methods >check.log 2>&1; do kill -0 $(jobs -p); sleep 0.2; done",
        'nekro call send_msg_text --args \'["cli", "hi"]\' --json --timeout 30',
    ]
    (folder / "script.yaml").write_text("- when: x\n  answer: y\n")
    said = run("\n".join(lines), folder, environment)
    assert '"type": "tool"' in said
