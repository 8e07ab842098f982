"""The completion scripts in the real shells; none of them starts a program."""

from __future__ import annotations

import os
import pty
import re
import shutil
import subprocess
from collections.abc import Callable
from multiprocessing.connection import wait
from pathlib import Path

import pytest
from nekro_shell import Shell, open_shell
from waiting import WAIT_SECONDS, wait_until

Complete = Callable[[str], set[str]]


def script(shell_name: str, directory: Path) -> Path:
    """Write the script that `nekro completion` prints."""
    with open_shell({}) as shell:
        done = shell.inside("completion", shell_name)
    assert (done.code, done.err) == (0, "")
    file = directory / f"script.{shell_name}"
    file.write_text(done.out, "utf-8")
    return file


def require(program: str) -> str:
    found = shutil.which(program)
    if found is None:
        pytest.skip(f"{program} is not installed")
    return found


def environment(directory: Path) -> dict[str, str]:
    """Without any program but the shell's own: completing must start none."""
    return {"HOME": str(directory), "PATH": "/nowhere", "TERM": "dumb", "LC_ALL": "C.UTF-8"}


def in_bash(directory: Path) -> Complete:
    bash, file = require("bash"), script("bash", directory)

    def complete(line: str) -> set[str]:
        words = " ".join(f"'{word}'" for word in line.split(" "))
        body = (
            f"source {file}; COMP_WORDS=({words}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1));"
            '[[ $(complete -p nekro) =~ -F\\ ([^ ]+) ]]; "${BASH_REMATCH[1]}" nekro "${COMP_WORDS[-1]}"; '
            'printf "%s\\n" "${COMPREPLY[@]}"'
        )
        done = subprocess.run(
            [bash, "--norc", "-c", body],
            cwd=directory,
            env=environment(directory),
            capture_output=True,
            text=True,
            timeout=WAIT_SECONDS,
        )
        return {word.strip() for word in done.stdout.splitlines()} - {""}

    return complete


def in_fish(directory: Path) -> Complete:
    fish, file = require("fish"), script("fish", directory)

    def complete(line: str) -> set[str]:
        done = subprocess.run(
            [fish, "--no-config", "-c", f"source {file}; complete -C '{line}'"],
            cwd=directory,
            env={**environment(directory), "PATH": os.environ["PATH"]},  # fish's own functions need some
            capture_output=True,
            text=True,
            timeout=WAIT_SECONDS,
        )
        assert done.returncode == 0, done.stderr
        return {word.split("\t")[0] for word in done.stdout.splitlines()}

    return complete


def in_zsh(directory: Path) -> Complete:
    zsh, file = require("zsh"), script("zsh", directory)
    functions = directory / "functions"
    functions.mkdir()
    shutil.copy(file, functions / "_nekro")
    (directory / ".zshrc").write_text(
        f"fpath=({functions} $fpath)\nautoload -U compinit\ncompinit -u -D\nPS1='ready> '\n"
        "zstyle ':completion:*' menu no\nsetopt no_list_beep auto_list\nLISTMAX=1000\n",
        "utf-8",
    )

    def complete(line: str) -> set[str]:
        """Type the line and two tabs at a terminal."""
        pid, terminal = pty.fork()
        if pid == 0:
            os.chdir(directory)
            os.execve(
                zsh, [zsh, "-i"], {**environment(directory), "ZDOTDIR": str(directory), "COLUMNS": "200"}
            )
        shown = ""

        def until(words: str) -> bool:
            nonlocal shown
            while wait([terminal], 0):
                shown += os.read(terminal, 65536).decode(errors="replace")
            return words in shown

        try:
            wait_until(lambda: until("ready> "), what="zsh")
            shown = ""
            os.write(terminal, line.encode() + b"\t\x04")  # Ctrl-D lists what fits
            os.write(terminal, b'\x15echo en""d\n')  # Ctrl-U drops the line
            wait_until(lambda: until("\nend") or until("\rend"), what="the list")
            return set(re.findall(r"[\w.-]+", shown))
        finally:
            os.write(terminal, b"exit\n")
            os.close(terminal)
            os.waitpid(pid, 0)

    return complete


SHELLS = {"bash": in_bash, "zsh": in_zsh, "fish": in_fish}


@pytest.mark.parametrize("name", SHELLS)
def test_commands_options_and_choices_are_completed(name: str, tmp_path: Path) -> None:
    complete = SHELLS[name](tmp_path)
    assert "timers" in complete("nekro tim")
    assert {"--lane", "--concurrency", "--data-dir"} <= complete("nekro worker --")
    assert {"methods", "long", "rounds", "pinned"} <= complete("nekro worker --lane ")
    assert "upgrade" in complete("nekro db ")


@pytest.mark.parametrize("name", ["bash", "fish"])
def test_files_are_completed_where_a_command_takes_one(name: str, tmp_path: Path) -> None:
    complete = SHELLS[name](tmp_path)
    (tmp_path / "shopping.py").touch()
    assert "shopping.py" in complete("nekro exec shop")


def test_an_unknown_shell_is_refused() -> None:
    with open_shell({}) as shell:
        done = shell.inside("completion", "tcsh")
    assert (done.code, "invalid choice: 'tcsh'" in done.err) == (2, True)
    assert isinstance(shell, Shell)
