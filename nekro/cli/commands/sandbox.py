"""`nekro sandbox packages`: the packages that every sandbox of this host can import."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from nekro.cli.command import Deps, arg, json_flag
from nekro_agent.errors import UsageError

__all__ = ["EPILOG", "Args", "run"]

EPILOG: Final = """\
examples:
  nekro sandbox packages
  nekro sandbox packages list --json
  nekro sandbox packages build
  nekro sandbox packages add 'sympy>=1.14' --pip-arguments '--no-index --find-links ./wheels'
  nekro sandbox packages remove sympy

`make install` and the image build the default set (numpy, pandas, matplotlib with fonts for Chinese, Japanese
and Korean, Pillow, openpyxl, python-dateutil). `add` installs more, from wheels only. A change makes a new
version beside the old one: the next run has it, a running one keeps the old, and a failed change changes
nothing. Every host with rounds workers needs its own; prompts state what their own worker's host has.
`--json` prints {path, python, named, packages}: `named` without, `packages` with dependencies, as pairs of
name and version; path and python are null where there is no layer.
"""
_CHANGES: Final = ("build", "add", "remove")


@dataclass(frozen=True, kw_only=True)
class Args:
    """Arguments of `nekro sandbox`."""

    subject: str = arg(choices=("packages",), help="what to show or to change")
    action: str = arg(
        nargs="?",
        choices=("list", *_CHANGES),
        default="list",
        help="`list` (default); `build` the default set unless it is there; `add`; `remove`",
    )
    names: list[str] = arg(
        nargs="*", metavar="PACKAGE", default=[], help="add: name with versions; remove: name"
    )
    pip_arguments: str = arg(
        "--pip-arguments",
        metavar="TEXT",
        default="",
        help="build, add, remove: more arguments for pip, such as '--no-index --find-links DIR'",
    )
    json: bool = json_flag()


def run(args: Args, deps: Deps) -> int:
    """List the packages, after the change if there is one."""
    from nekro.sandbox.packages.base import read_base
    from nekro.sandbox.packages.base_build import add_packages, build_base, remove_packages

    if bool(args.names) != (args.action in ("add", "remove")):
        raise UsageError("write `nekro sandbox packages add PACKAGE` or `… remove PACKAGE`, else no package")
    settings = deps.load_settings().sandbox
    pip_arguments = args.pip_arguments
    if args.action == "build":
        build_base(settings, pip_arguments=pip_arguments)
    elif args.action == "add":
        add_packages(settings, args.names, pip_arguments=pip_arguments)
    elif args.action == "remove":
        remove_packages(settings, args.names, pip_arguments=pip_arguments)
    layer = read_base(settings)
    if args.json:
        deps.output.json(
            {
                "path": None if layer is None else str(layer.path),
                "python": None if layer is None else layer.python,
                "named": [] if layer is None else [list(pair) for pair in layer.named],
                "packages": [] if layer is None else [list(pair) for pair in layer.packages],
            }
        )
    elif layer is None:
        deps.output.words("no packages; `nekro sandbox packages build` installs the default set")
    else:
        deps.output.table(("package", "version"), layer.named)
    return 0
