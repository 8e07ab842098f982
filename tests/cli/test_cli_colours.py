"""Colours: at a real terminal, unless ``NO_COLOR`` is set, and nowhere else."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from nekro_shell import Shell, open_shell
from terminal import Terminal

pytestmark = pytest.mark.extended

#: Any change of colour or style.
STYLE = re.compile(r"\x1b\[[0-9;]*m")
#: Prints a table and, with `--debug`, log records.
COMMANDS = (["plugins"], ["--debug", "plugins"], ["doctor", "--settings"])


@pytest.fixture(scope="module")
def shell() -> Iterator[Shell]:
    with open_shell({"broken.py": "import nothing_like_this\nplugin = 1\n"}) as shell:
        shell.environment.pop("NO_COLOR", None)
        shell.environment["TERM"] = "xterm-256color"
        yield shell


def at_terminal(shell: Shell, arguments: list[str], **variables: str) -> str:
    environment = {**shell.environment, **variables}
    terminal = Terminal(arguments, directory=shell.directory, environment=environment)
    try:
        terminal.ended()
        return terminal.shown
    finally:
        terminal.close()


@pytest.mark.parametrize("arguments", COMMANDS, ids=" ".join)
def test_a_terminal_gets_colours_unless_no_color_is_set(shell: Shell, arguments: list[str]) -> None:
    assert STYLE.search(at_terminal(shell, arguments))
    assert STYLE.search(at_terminal(shell, arguments, NO_COLOR=""))
    plain = at_terminal(shell, arguments, NO_COLOR="1")
    assert plain
    assert not STYLE.search(plain)


@pytest.mark.parametrize("arguments", COMMANDS, ids=" ".join)
def test_a_pipe_gets_no_colours_even_on_request(shell: Shell, arguments: list[str]) -> None:
    done = shell(*arguments, FORCE_COLOR="1", CLICOLOR_FORCE="1")
    assert done.out
    assert not STYLE.search(done.out + done.err)
