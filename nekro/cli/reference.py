"""Write the generated reference pages: `python -m nekro.cli.reference`, or `--check` to only compare.

``docs/reference/cli.md`` comes from the parsers, ``docs/reference/settings.md`` from the settings models, and
``docs/openapi.json`` from the routes of the API; a test fails when one is stale.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Final

from broker_config.model_groups import ModelGroupSettings
from broker_config.settings import Settings, known_variables
from nekro.cli.environment import setting_text
from nekro.cli.main import COMMANDS, LazyParser, build_parser
from nekro.cli.running import EXEC_CODES, ExitCode

__all__ = ["main", "pages"]

_ROOT: Final = Path(__file__).resolve().parents[2] / "docs" / "reference"
_NOTICE: Final = "<!-- Written by `make docs`; change the code instead. -->"

_CLI_INTRO: Final = """
Data goes to stdout, messages go to stderr. Listings take `--json`. An error is one line that names the
fault and its fix; `--debug` adds the traceback. With `--json`, stdout then has one object and nothing else,
in one line: `{"error": {"type", "message"}}`, with further keys where a command has a partial result.

Commands that need a running system use the one of `NEKRO_BROKER__URL`, else the `nekro up` of the data
directory. When there is none, they start services of their own, which end with the command; the logs of
those workers are in `<data dir>/logs/`.
"""

_EXEC_CODES: Final = """
`up`, `worker`, `flower` and `metrics --port` run until Ctrl-C or SIGTERM ends them, `tail` until Ctrl-C;
the exit code is then 0.

The exit code of `nekro exec` is the stop type of the run: 0 NORMAL, 1 ERROR, 2 TIMEOUT, 8 AGENT, 9 MANUAL,
10 SECURITY, 11 MULTIMODAL_AGENT, 14 APPROVAL. When the code did not run at all it returns the codes above,
except for those that are stop types:"""

_SETTINGS_INTRO: Final = """
Environment variables, or lines of a `.env` file in the working directory; the environment wins. Lists are
written `a,b,c`. A `NEKRO_` name that is not on this page is an error. `nekro doctor --settings` shows the
values in force."""


def pages() -> dict[str, str]:
    """Return each page's text by its path below ``docs/reference``."""
    from nekro.gateway.app import create_app
    from nekro.gateway.document.openapi import document

    # No environment: the document describes the release, not an installation.
    api = document(create_app(Settings.model_construct()))
    return {"cli.md": _cli_page(), "settings.md": _settings_page(), "../openapi.json": api}


def main(argv: Sequence[str] | None = None) -> int:
    """Write the pages, or compare them; 1 when one is stale."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when a page is stale")
    arguments = parser.parse_args(argv)
    stale = [name for name, text in pages().items() if _read(_ROOT / name) != text]
    if arguments.check:
        for name in stale:
            sys.stderr.write(f"docs/reference/{name} is stale; run `make docs`\n")
        return 1 if stale else 0
    _ROOT.mkdir(parents=True, exist_ok=True)
    for name, text in pages().items():
        (_ROOT / name).write_text(text, "utf-8")
    return 0


def _read(path: Path) -> str | None:
    return path.read_text("utf-8") if path.exists() else None


def _cli_page() -> str:
    # Written from the parsers' actions and not by argparse's formatter, whose layout differs between
    # versions of Python and widths of terminals.
    parser = build_parser()
    parts = [_NOTICE, "# Command line", _CLI_INTRO, "| command | does |", "|---|---|"]
    parts += [
        f"| [`nekro {command.name}`](#nekro-{command.name}) | {command.summary} |" for command in COMMANDS
    ]
    parts += ["", "Before or after the command's name:", "", *_options(parser)]
    parts += ["", "## Exit codes", "", *_exit_codes()]
    global_options = {option for action in parser._actions for option in action.option_strings}
    for name, sub in _subparsers(parser):
        parts += [
            "",
            f"## nekro {name}",
            "",
            f"{sub.description}",
            "",
            *_options(sub, without=global_options),
        ]
        if sub.epilog:
            parts += ["", "```text", sub.epilog.strip(), "```"]
    return "\n".join(parts) + "\n"


def _options(parser: argparse.ArgumentParser, *, without: Collection[str] = ()) -> Iterator[str]:
    rows = []
    for action in parser._actions:
        is_left_out = action.help is argparse.SUPPRESS or set(action.option_strings) & set(without)
        if is_left_out or isinstance(action, argparse._SubParsersAction):
            continue
        words = (action.help or "") % {**vars(action), "prog": parser.prog}
        rows.append(f"| `{_spelling(action)}` | {words} |")
    if rows:
        yield from ("| argument | meaning |", "|---|---|", *rows)


def _spelling(action: argparse.Action) -> str:
    value = action.metavar or ("\\|".join(action.choices) if action.choices else "")
    if not action.option_strings:
        return f"[{value}]" if action.nargs in ("?", "*") else f"{value}"
    if action.nargs != 0 and not value:
        value = action.dest.upper()
    return ", ".join(action.option_strings) + (f" {value}" if value else "")


def _exit_codes() -> Iterator[str]:
    yield "| code | name | meaning |"
    yield "|---|---|---|"
    for code in ExitCode:
        yield f"| {code.value} | {code.name} | {code.meaning} |"
    replaced = " and ".join(f"{new} instead of {old.value}" for old, new in EXEC_CODES.items())
    yield f"{_EXEC_CODES} {replaced}."


def _subparsers(parser: LazyParser) -> Iterator[tuple[str, LazyParser]]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in COMMANDS:
                sub = action.choices[command.name]
                sub.declare()
                yield command.name, sub


def _settings_page() -> str:
    parts = [_NOTICE, "# Settings", _SETTINGS_INTRO]
    last = None
    for variable, group, field in known_variables():
        if group != last:
            title, words = _group_title(group)
            parts += ["", f"## {title}", "", *([words, ""] if words else [])]
            parts += ["| variable | default | meaning |", "|---|---|---|"]
            last = group
        default = field.get_default(call_default_factory=True)
        shown = "data" if variable == "NEKRO_DATA_DIR" else setting_text(default)
        value = f"`{shown}`" if shown else "unset"
        parts.append(f"| `{variable}` | {value} | {field.description} |")
    parts += ["", "## models", "", "The values of each model group (`NEKRO_MODELS`).", ""]
    parts += ["| variable | default | meaning |", "|---|---|---|"]
    for leaf, field in ModelGroupSettings.model_fields.items():
        default = "required" if field.is_required() else setting_text(field.default) or "unset"
        parts.append(f"| `NEKRO_MODELS__NAME__{leaf.upper()}` | {default} | {field.description} |")
    return "\n".join(parts) + "\n"


def _group_title(group: str) -> tuple[str, str]:
    if not group:
        return "General", ""
    model = Settings.model_fields[group].annotation
    return group, (model.__doc__ or "").strip().split("\n")[0]


if __name__ == "__main__":
    sys.exit(main())
