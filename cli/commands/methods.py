"""`nekro methods`: the catalogue."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cli.catalogue import load_catalogue
from cli.command import Deps, add_json
from cli.output import one_line

if TYPE_CHECKING:
    from workers.registry import MethodEntry

__all__ = ["Args", "register", "run"]

_DOC_COLUMNS = 60

_EPILOG = """\
examples:
  nekro methods
  nekro methods Nekro.notes
  nekro methods --json

`--json` prints a list of {name, task, plugin, type, lane, signature, doc}.
"""


@dataclass(frozen=True, kw_only=True)
class Args:
    """Arguments of `nekro methods`."""

    filter: str
    json: bool


def register(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.epilog = _EPILOG
    parser.add_argument(
        "filter", nargs="?", default="", metavar="TEXT", help="only methods whose full name contains it"
    )
    add_json(parser)


def run(args: Args, deps: Deps) -> int:
    """List the methods that code may call."""
    registry = load_catalogue(deps.load_settings()).registry
    listed = [describe(entry) for entry in registry.enabled() if args.filter in entry.task]
    if args.json:
        deps.output.json(listed)
        return 0
    rows = [
        (
            m["name"],
            m["type"],
            m["lane"],
            m["signature"],
            m["plugin"],
            one_line(_first_line(m["doc"]), limit=60),
        )
        for m in listed
    ]
    deps.output.table(("NAME", "TYPE", "LANE", "SIGNATURE", "PLUGIN", "WHAT IT DOES"), rows)
    for warning in registry.warnings:
        deps.output.words(f"warning: {warning}")
    return 0


def describe(entry: MethodEntry) -> dict[str, Any]:
    """Return one method as ``--json`` prints it."""
    return {
        "name": entry.name,
        "task": entry.task,
        "plugin": entry.plugin.key,
        "type": entry.type.value,
        "lane": entry.lane.value,
        "signature": entry.signature,
        "doc": entry.doc,
    }


def _first_line(text: str | None) -> str:
    return one_line(text.strip().partition("\n")[0], limit=_DOC_COLUMNS) if text else ""
