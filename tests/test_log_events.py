"""A log record is a constant event name and fields, so that alarms and searches can match the name."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from test_layers import PACKAGES
from test_lines_of_others import python_files

ROOT = Path(__file__).parent.parent
LEVELS = {"trace", "debug", "info", "success", "warning", "error", "critical", "exception"}
#: What a logger is called, before ``bind`` and ``opt``.
LOGGER = re.compile(r"(\w+\.)*(logger|_?log)\b")
EVENT = re.compile(r"[a-z][a-z0-9_]*")
#: Where the name is not constant, or something follows it.
ALLOWED = {
    "nekro/base/tasks.py": "its callers name the event",
    "nekro_agent/core/logger.py": "its callers name the event",
    "workers/ops/printed.py": "lines that plugins print, as they are",
    "workers/plugins/loop_watchdog.py": "a stack follows the name",
    "nekro/extensions/plugin_pages/hosts.py": "a stack follows the name",
}


def is_event(message: ast.expr) -> bool:
    """Whether a message is an event name, or one of two."""
    if isinstance(message, ast.IfExp):
        return is_event(message.body) and is_event(message.orelse)
    is_text = isinstance(message, ast.Constant) and isinstance(message.value, str)
    return is_text and EVENT.fullmatch(message.value) is not None


def other_messages(path: Path) -> list[str]:
    """Source of the calls of loggers whose message is not an event name."""
    found = []
    text = path.read_text("utf-8")
    for node in ast.walk(ast.parse(text)) if "logger" in text else ():
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute) or not node.args:
            continue
        is_log = node.func.attr in LEVELS and LOGGER.match(ast.unparse(node.func.value))
        if is_log and not is_event(node.args[0]):
            found.append(ast.unparse(node))
    return found


def test_every_log_record_has_a_constant_event_name() -> None:
    paths = [path for package in PACKAGES for path in python_files(ROOT / package)]
    found = {str(path.relative_to(ROOT)): calls for path in paths if (calls := other_messages(path))}
    assert {name: calls for name, calls in found.items() if name not in ALLOWED} == {}
    assert ALLOWED.keys() <= found.keys(), "remove the entries that are no longer needed"
