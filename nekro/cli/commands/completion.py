"""`nekro completion`: print the script that completes `nekro` in a shell."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from nekro.cli.command import Deps, arg

__all__ = ["EPILOG", "Args", "run"]

EPILOG: Final = """\
examples:
  nekro completion bash > ~/.local/share/bash-completion/completions/nekro
  nekro completion zsh > ~/.zsh/functions/_nekro
  nekro completion fish > ~/.config/fish/completions/nekro.fish

Completes commands, options, their choices and files; the shell starts no program for it. zsh needs the
folder in its search path, `fpath=(~/.zsh/functions $fpath)`, before `compinit` in ~/.zshrc. Print the script
again after an upgrade.
"""
_SHELLS: Final = ("bash", "zsh", "fish")


@dataclass(frozen=True, kw_only=True)
class Args:
    """Arguments of `nekro completion`."""

    shell: str = arg(choices=_SHELLS, metavar="SHELL", help="bash, zsh or fish")


def run(args: Args, deps: Deps) -> int:
    """Print the script."""
    import shtab

    from nekro.cli.main import build_parser

    parser = build_parser()
    for action in list(parser._actions):
        if isinstance(action, argparse._SubParsersAction):
            for sub in action.choices.values():
                sub.declare()
                _complete_files(sub)
    _complete_files(parser)
    deps.output.data(shtab.complete(parser, shell=args.shell).rstrip("\n"))
    return 0


def _complete_files(parser: argparse.ArgumentParser) -> None:
    import shtab

    for action in parser._actions:
        if action.type is Path:
            kind = shtab.DIRECTORY if action.metavar == "DIR" else shtab.FILE
            action.complete = kind  # type: ignore[attr-defined]
