"""The types of sandbox methods, their lanes, registration and signatures."""

from __future__ import annotations

import enum
import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from pydantic import BaseModel

from nekro_agent.errors import ResultError

__all__ = [
    "BUILT_IN_METHODS",
    "BUILT_IN_PLUGIN",
    "OWN_NAMES",
    "WAIT_METHODS",
    "BuiltInMethod",
    "Lane",
    "PromptInjectMethod",
    "SandboxMethod",
    "SandboxMethodType",
    "WebhookMethod",
    "describe_signature",
    "segments_of",
    "takes_context_second",
]

#: Names that the sandbox gives the code itself; a method of such a name has no bare name in the code.
OWN_NAMES: Final = frozenset({"ApprovalDeniedError", "_ck", "MethodError", "dynamic_importer"})


class SandboxMethodType(StrEnum):
    """How a method's result is used."""

    #: The value goes to the calling code.
    TOOL = "tool"
    #: The text becomes an observation and triggers the LLM at once; the calling code ends.
    AGENT = "agent"
    #: The value goes to the calling code, its text to the chat's history.
    BEHAVIOR = "behavior"
    #: Content parts become an observation and trigger the LLM at once; the calling code ends.
    MULTIMODAL_AGENT = "multimodal_agent"

    @property
    def wakes_agent(self) -> bool:
        """Whether a result ends the calling code and requests a follow-up round."""
        return self in (SandboxMethodType.AGENT, SandboxMethodType.MULTIMODAL_AGENT)


class Lane(StrEnum):
    """The kind of work that a task belongs to; each lane has its own queue and pool."""

    METHODS = "methods"
    LONG = "long"
    ROUNDS = "rounds"
    #: Each pinned plugin has a queue of its own, ``pinned.<plugin key>``, served by its owner.
    PINNED = "pinned"


@dataclass
class SandboxMethod:
    """One registered sandbox method, as ``mount_sandbox_method`` stores it."""

    method_type: SandboxMethodType
    name: str
    description: str
    func: Callable[..., Any]
    lane: Lane | None = None
    #: Whether a person must approve each call, unless the installation exempts the method.
    requires_approval: bool = False
    #: Whether a call of a TOOL method runs at most once, like those of the other types.
    once: bool = False


@dataclass
class PromptInjectMethod:
    """The function that adds a text to the prompt, as ``mount_prompt_inject_method`` stores it."""

    name: str
    description: str
    func: Callable[..., Any]


@dataclass
class WebhookMethod:
    """One registered webhook, as ``mount_webhook_method`` stores it."""

    name: str
    description: str
    func: Callable[..., Any]


@dataclass(frozen=True, kw_only=True)
class BuiltInMethod:
    """A method that the code of every chat has without a plugin."""

    name: str
    #: As in ``MethodBrief``.
    signature: str
    doc: str
    #: In the code of a round. Outside of rounds the code gets the text as the value, as from a TOOL.
    type: SandboxMethodType


#: Plugin key of the methods below; no plugin may have it.
BUILT_IN_PLUGIN: Final = "nekro.catalogue"
#: By name; a plugin's method of such a name has no bare name in the code.
BUILT_IN_METHODS: Final = {
    method.name: method
    for method in (
        BuiltInMethod(
            name="help_of",
            signature="(*names: str) -> str",
            doc="""Read signature and documentation of methods in the next round.

Args:
    names (str): Names of methods, or of plugins, whose methods are then listed.

Example:
    help_of("get_weather", "get_forecast")""",
            type=SandboxMethodType.AGENT,
        ),
        BuiltInMethod(
            name="search_tools",
            signature="(words: str, limit: int = 10) -> list[dict[str, str]]",
            doc="""Find methods of this chat by words of their names and documentation.

Args:
    words (str): Words, in any order.
    limit (int): Most methods to return, at most 50.

Returns:
    list[dict[str, str]]: Best match first: name, signature, summary, plugin.

Example:
    print(search_tools("weather forecast")); exit(9)""",
            type=SandboxMethodType.TOOL,
        ),
        BuiltInMethod(
            name="activate_plugin",
            signature="(module_name: str, rounds: int = 5) -> str",
            doc="""Wake a plugin that is asleep; the next round shows its methods.

Args:
    module_name (str): The plugin's `module`.
    rounds (int): For how many of this chat's next turns it stays awake, at most 20.

Example:
    activate_plugin("weather")""",
            type=SandboxMethodType.AGENT,
        ),
        BuiltInMethod(
            name="extend_plugin_activation",
            signature="(module_name: str, rounds: int = 3) -> str",
            doc="""Keep a plugin awake for more turns.

Args:
    module_name (str): The plugin's `module`.
    rounds (int): Further turns; at most 20 remain.""",
            type=SandboxMethodType.BEHAVIOR,
        ),
        BuiltInMethod(
            name="read_rest",
            signature="(handle: str, start: int = 0, most: int = 1_000_000) -> str",
            doc="""Read a text of this chat that the prompt shows cut.

Args:
    handle (str): As the gap in the text states it.
    start (int): First character.
    most (int): Most characters, at most 1,000,000.

Returns:
    str: The text from there; "" after its end.

Example:
    print(read_rest("call:1f0c", 9000, most=4000)); exit(9)""",
            type=SandboxMethodType.TOOL,
        ),
        BuiltInMethod(
            name="wait_for_job",
            signature="(job_id: str, timeout: float | None = None) -> Any",
            doc="""Wait until a job of this chat ends, for days if need be.

Args:
    job_id (str): As the text about the job states it.
    timeout (float | None): Seconds; then TimeoutError is raised.

Returns:
    Any: Its value. If it failed, its error is raised as MethodError.""",
            type=SandboxMethodType.TOOL,
        ),
        BuiltInMethod(
            name="sleep_until",
            signature="(time: datetime | float | str) -> None",
            doc="""Wait until a time, for days if need be.

Args:
    time (datetime | float | str): With a time zone, a timestamp, or ISO 8601 with an offset.

Example:
    sleep_until("2030-01-31T09:00:00+01:00")""",
            type=SandboxMethodType.TOOL,
        ),
        BuiltInMethod(
            name="ask_user",
            signature="(question: str, choices: list[str] | None = None, "
            "timeout: float | None = None) -> str",
            doc="""Ask the person who wrote, and wait for the next message, for days if need be.

Args:
    question (str): Sent to the chat, with the choices; do not send it yourself.
    choices (list[str] | None): Shown as a list or as buttons.
    timeout (float | None): Seconds; then TimeoutError is raised.

Returns:
    str: The choice, or whatever the person wrote instead.

Example:
    if ask_user("Which one?", ["red", "blue"]) == "red": ...""",
            type=SandboxMethodType.TOOL,
        ),
    )
}


#: Those in which a program waits, without a process; no worker runs them.
WAIT_METHODS: Final = frozenset({"ask_user", "sleep_until", "wait_for_job"})


#: Module prefixes of names inside an annotation: ``typing.List`` is shown as ``List``.
#: Quoted text, as in ``Literal['a.b']``, is matched first and kept.
_QUALIFIER = re.compile(r"'[^']*'|\"[^\"]*\"|\b(?:[A-Za-z_]\w*\.)+(?=[A-Za-z_])")

_STARS = {"VAR_POSITIONAL": "*", "VAR_KEYWORD": "**"}

_LITERALS = (str, bytes, int, float, bool, type(None))


def describe_signature(func: Callable[..., Any]) -> str:
    """Return the signature text for callers, for example ``(city: str, days: int = 3) -> str``.

    The first positional parameter, which receives the context, is left out. A default that is
    not a literal is shown as ``...``.
    """
    try:
        signature = inspect.signature(func)
    except (TypeError, ValueError):
        return "(*args, **kwargs)"
    swapped = takes_context_second(signature)
    visible = list(signature.parameters.values())
    if visible and visible[0].kind in (
        inspect.Parameter.POSITIONAL_ONLY,
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
    ):
        first = visible.pop(0)
        if swapped is not None:
            # The second parameter receives the code's first argument; show it under its intended name.
            visible[0] = visible[0].replace(name=first.name, annotation=first.annotation)
    parts: list[str] = []
    kinds = [parameter.kind for parameter in visible]
    for index, parameter in enumerate(visible):
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY and not any(
            kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.KEYWORD_ONLY)
            for kind in kinds[:index]
        ):
            parts.append("*")
        parts.append(_parameter(parameter))
    returns = signature.return_annotation
    arrow = "" if returns is inspect.Signature.empty else f" -> {_annotation(returns)}"
    return f"({', '.join(parts)}){arrow}"


def takes_context_second(signature: inspect.Signature) -> tuple[str, str] | None:
    """Return the names of the first two parameters if only the second one is annotated as the context."""
    names = list(signature.parameters.values())[:2]
    if len(names) == 2 and _is_context(names[1]) and not _is_context(names[0]):
        return names[0].name, names[1].name
    return None


def _is_context(parameter: inspect.Parameter) -> bool:
    annotation = parameter.annotation
    text = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", "")
    return text.rsplit(".", 1)[-1].strip("'\"") == "AgentCtx"


def _parameter(parameter: inspect.Parameter) -> str:
    text = _STARS.get(parameter.kind.name, "") + parameter.name
    annotated = parameter.annotation is not inspect.Parameter.empty
    if annotated:
        text += f": {_annotation(parameter.annotation)}"
    if parameter.default is not inspect.Parameter.empty:
        text += f"{' = ' if annotated else '='}{_default(parameter.default)}"
    return text


def _annotation(annotation: Any) -> str:
    if isinstance(annotation, str):
        return annotation.strip("'\"")
    if annotation is None or annotation is type(None):
        return "None"
    text = str(inspect.formatannotation(annotation))
    return _QUALIFIER.sub(lambda match: match[0] if match[0][0] in "'\"" else "", text)


def _default(value: Any) -> str:
    if isinstance(value, enum.Enum):
        # The enum's class does not exist in the sandbox; the caller passes its value.
        value = value.value
    plain = isinstance(value, _LITERALS) or (
        isinstance(value, list | tuple | set | dict) and all(isinstance(item, _LITERALS) for item in value)
    )
    text = repr(value)
    return text if plain and len(text) <= 80 else "..."


def segments_of(result: Any, *, name: str) -> list[dict[str, Any]]:
    """Return the result of a MULTIMODAL_AGENT method as a list of OpenAI content parts.

    Accepted: a list of parts and texts, one part, a text, or a message with ``role`` and ``content``.

    Raises:
        ResultError: it has another form; the message names the method and the type.
    """
    if isinstance(result, BaseModel):
        result = result.model_dump(mode="json")
    if isinstance(result, dict) and "content" in result and "type" not in result:
        return segments_of(result["content"], name=name)
    if isinstance(result, str):
        return [{"type": "text", "text": result}]
    if isinstance(result, dict):
        result = [result]
    if not isinstance(result, list | tuple) or not result:
        got = f"{type(result).__name__}" if result else f"an empty {type(result).__name__}"
        raise ResultError(
            f"{name} must return content parts: a list of {{'type': …}} parts, one part, a text, "
            f"or a message with role and content; it returned {got}"
        )
    return [_segment(part, name=name) for part in result]


def _segment(part: Any, *, name: str) -> dict[str, Any]:
    if isinstance(part, BaseModel):
        part = part.model_dump(mode="json")
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if isinstance(part, dict) and isinstance(part.get("type"), str):
        return part
    raise ResultError(f"{name} returned a content part without a type: {type(part).__name__}")
