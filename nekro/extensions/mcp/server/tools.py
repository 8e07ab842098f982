"""The tools that a key may use: those of the system, then one for each method."""

from __future__ import annotations

import hashlib
import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from typing import Any, Final

from mcp_types import ListToolsResult, Tool, ToolAnnotations

from nekro.base.plain import encodable
from nekro.extensions.mcp.server.callers import Caller
from nekro.extensions.mcp.server.methods import bounded_catalogue, input_schema, result_annotation
from nekro.operations.actor import Scope
from nekro.operations.pages import cursor_of, text_of
from nekro.plugins.entries import MethodEntry
from nekro.plugins.entry_registry import Registry

__all__ = [
    "CANCEL_JOB",
    "FIND_METHODS",
    "RUN_CODE",
    "SHOW_JOBS",
    "WAIT_FOR_JOB",
    "list_tools",
    "method_tools",
    "tool_name",
]

RUN_CODE: Final = "run_code"
FIND_METHODS: Final = "find_methods"
SHOW_JOBS: Final = "show_jobs"
WAIT_FOR_JOB: Final = "wait_for_job"
CANCEL_JOB: Final = "cancel_job"
#: Tools of methods on one page.
_PAGE: Final = 100
#: What every host and model accepts as a name.
_NAME: Final = re.compile(r"[A-Za-z0-9_-]{1,64}")
_NAME_CHARS: Final = 55
_RUN_CODE_TEXT: Final = """\
Run a Python program in a sandbox without network. In it, every method of the plugins is a function: call \
several of them in one program, with loops and conditions, and print what you need. `find_methods` finds \
methods with their signatures. Files are below /app/uploads and /app/shared. The result is what the program \
printed, and a report of its calls.

Methods:

"""


def list_tools(registry: Registry, caller: Caller, cursor: str | None) -> ListToolsResult:
    """Return a page of the tools; the tools of the system are on the first one.

    Raises:
        RefusedError: the cursor is none of ours.
    """
    own = [tool for tool, scope in _own(registry) if caller.may(scope)] if cursor is None else []
    if not caller.may(Scope.CALL):
        return ListToolsResult(tools=own)
    methods = method_tools(registry)
    names = sorted(methods)
    begin = 0 if cursor is None else bisect_right(names, text_of(cursor))
    shown = names[begin : begin + _PAGE]
    more = cursor_of(shown[-1]) if begin + _PAGE < len(names) else None
    return ListToolsResult(tools=[*own, *(_tool(name, methods[name]) for name in shown)], next_cursor=more)


def method_tools(registry: Registry) -> Mapping[str, MethodEntry]:
    """Return the methods that may be called, by the names of their tools."""
    methods: dict[str, MethodEntry] = {}
    for entry in sorted(registry.enabled(), key=lambda entry: entry.task):
        name = tool_name(entry.task)
        methods[_digested(entry.task) if name in methods else name] = entry
    return methods


def tool_name(task: str) -> str:
    """Return the name of a method's tool: the full name with hyphens for dots.

    A name that hosts do not accept is cut, without other characters, and gets a digest of the full name.

    >>> tool_name("nekro.notes.save_note")
    'nekro-notes-save_note'
    """
    name = task.replace(".", "-")
    return name if _NAME.fullmatch(name) else _digested(task)


def _digested(task: str) -> str:
    plain = re.sub(r"[^A-Za-z0-9_-]", "_", task.replace(".", "-"))
    return f"{plain[:_NAME_CHARS]}-{hashlib.sha256(task.encode()).hexdigest()[:8]}"


def _tool(name: str, entry: MethodEntry) -> Tool:
    returns = result_annotation(entry)
    described = "The value of the method" + (f": {returns}" if returns else "")
    notes = "\n\nA person must approve each call." if entry.requires_approval else ""
    text = f"{entry.name}{entry.signature}\n\n{entry.doc or ''}".strip() + notes
    return Tool(
        name=name,
        title=str(encodable(entry.label)) or None,
        description=str(encodable(text)),
        input_schema=input_schema(entry),
        # A worker does not enforce the type that a method states, so the value is left open.
        output_schema={"type": "object", "properties": {"result": {"description": described}}},
        meta={
            "nekro/method": entry.task,
            "nekro/type": entry.type.value,
            "nekro/requires_approval": entry.requires_approval,
        },
    )


def _own(registry: Registry) -> Iterator[tuple[Tool, Scope]]:
    described = _RUN_CODE_TEXT + str(encodable(bounded_catalogue(registry)))
    yield _RUN_CODE.model_copy(update={"description": described}), Scope.RUN
    yield from _OTHERS


def _own_tool(
    name: str, title: str, description: str, properties: dict[str, Any], *required: str, only_reads: bool
) -> Tool:
    return Tool(
        name=name,
        title=title,
        description=description,
        input_schema={
            "type": "object",
            "properties": properties,
            "required": list(required),
            "additionalProperties": False,
        },
        annotations=ToolAnnotations(read_only_hint=only_reads),
    )


_JOB_ID: Final = {"type": "string", "description": "Id of the job, as a tool's result names it."}
_RUN_CODE: Final = _own_tool(
    RUN_CODE,
    "Run code",
    _RUN_CODE_TEXT,
    {"code": {"type": "string", "description": "The program, Python 3."}},
    "code",
    only_reads=False,
)
_OTHERS: Final = (
    (
        _own_tool(
            FIND_METHODS,
            "Find methods",
            "Find methods for `run_code` by words of their names and descriptions. Returns signatures and "
            "descriptions, at most 20; without words, the names of all methods.",
            {"words": {"type": "string", "description": "Words to look for; all of them must occur."}},
            only_reads=True,
        ),
        Scope.RUN,
    ),
    (
        _own_tool(
            SHOW_JOBS,
            "Show jobs",
            "Return the state of a background job, or of the newest jobs of the chat.",
            {"job_id": {**_JOB_ID, "description": "Id of one job; without it, the newest 20 jobs."}},
            only_reads=True,
        ),
        Scope.READ,
    ),
    (
        _own_tool(
            WAIT_FOR_JOB,
            "Wait for a job",
            "Wait until a background job has ended, and return its state. A job that still runs after that "
            "time is returned as it is.",
            {
                "job_id": _JOB_ID,
                "seconds": {
                    "type": "number",
                    "description": "How long to wait.",
                    "minimum": 0,
                    "maximum": 600,
                    "default": 30,
                },
            },
            "job_id",
            only_reads=True,
        ),
        Scope.READ,
    ),
    (
        _own_tool(
            CANCEL_JOB,
            "Cancel a job",
            "Ask a background job to end. A job that has ended is returned unchanged.",
            {"job_id": _JOB_ID},
            "job_id",
            only_reads=False,
        ),
        Scope.ADMIN,
    ),
)
