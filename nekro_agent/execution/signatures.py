"""Describes the signature of a sandbox method for its caller: without the context."""

from __future__ import annotations

import enum
import inspect
import re
from collections.abc import Callable
from typing import Any

__all__ = ["describe", "takes_context_second"]

#: Module prefixes of names inside an annotation: ``typing.List`` is shown as ``List``.
#: Quoted text, as in ``Literal['a.b']``, is matched first and kept.
_QUALIFIER = re.compile(r"'[^']*'|\"[^\"]*\"|\b(?:[A-Za-z_]\w*\.)+(?=[A-Za-z_])")
_STARS = {"VAR_POSITIONAL": "*", "VAR_KEYWORD": "**"}
_LITERALS = (str, bytes, int, float, bool, type(None))


def describe(func: Callable[..., Any]) -> str:
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
