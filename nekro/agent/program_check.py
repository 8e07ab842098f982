"""What in a program cannot work, found before any of it runs.

A program that fails at its ninth line has made the calls of the lines before it. So what is certain to fail
is found first, and the model gets all of it at once: calls that do not fit the signatures of their methods,
literals where a method wants something else, and names that nothing defines. What may work is no finding:
the body of a ``try`` or ``suppress`` that would catch the error, functions that nothing uses, and names of a
program that defines some while it runs, or looks which there are.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from nekro.agent.answers.programs import defined_names, dotted_name, missing_names, parse
from nekro.sandbox.models import StubMethod
from nekro_agent.methods import OWN_NAMES

__all__ = ["Finding", "Misfit", "findings_of"]

#: Returns why a call of the method with a token, with so many positional and these named arguments, does not
#: fit it; None if it fits.
Misfit = Callable[[str, int, Sequence[str]], str | None]

#: Most findings that are reported.
_MOST: Final = 12
#: A program that reads one of these may define names while it runs, or looks which there are.
_DEFINE: Final = frozenset(
    {
        "exec", "eval", "globals", "locals", "vars", "dir", "setattr", "builtins", "__builtins__", "sys",
        "ctypes", "inspect",
    }
)  # fmt: skip
#: Handlers of these catch what an unfit call or an unknown name raises.
_CATCH: Final = frozenset({"BaseException", "Exception", "MethodError", "NameError", "TypeError"})
#: Names of modules and classes that are not built in.
_IMPLICIT: Final = frozenset({"__file__", "__annotations__", "__class__", "__module__", "__qualname__"})

#: Literals that are neither a text nor a number.
_CONTAINERS: Final = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp)


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Something that cannot work."""

    #: From 1.
    line: int
    text: str


def findings_of(
    code: str, methods: Iterable[StubMethod], *, kept: Collection[str], misfit: Misfit
) -> list[Finding]:
    """Return what in a program cannot work, by line; nothing if it is no Python, or too long to be parsed.

    Args:
        methods: those that the program may call.
        kept: variables that it begins with.
        misfit: checks the shape of a call.
    """
    tree = parse(code)
    if tree is None:
        return []
    by_name: dict[str, StubMethod] = {}
    for method in methods:
        by_name |= {name: method for name in (method.path, method.name) if name}
    defined = defined_names(tree) | set(kept)
    reached = list(_reached(tree))
    found = list(_unfit_calls(reached, by_name, defined, misfit))
    if not _may_define_names(tree):
        own = {name.partition(".")[0] for name in by_name}
        found += _unknown_names(reached, missing_names(tree, own | OWN_NAMES | _IMPLICIT | set(kept)))
    unique = {(one.line, one.text): one for one in found}
    return sorted(unique.values(), key=lambda one: (one.line, one.text))[:_MOST]


def _reached(tree: ast.Module) -> Iterator[ast.AST]:
    """Yield the nodes of a program but those whose failure it expects, or that nothing uses."""
    used = {getattr(node, "id", None) or getattr(node, "attr", None) for node in ast.walk(tree)}
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        yield node
        children = list(ast.iter_child_nodes(node))
        if isinstance(node, ast.Try | ast.TryStar) and any(map(_catches, node.handlers)):
            children = [*node.handlers, *node.orelse, *node.finalbody]
        elif isinstance(node, ast.With) and any(map(_suppresses, node.items)):
            children = [*node.items]
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name not in used:
            children = [*node.decorator_list, *node.args.defaults, *filter(None, node.args.kw_defaults)]
        waiting += children


def _suppresses(item: ast.withitem) -> bool:
    """Whether a context manager is ``contextlib.suppress``."""
    expression = item.context_expr
    return isinstance(expression, ast.Call) and dotted_name(expression.func).endswith("suppress")


def _catches(handler: ast.ExceptHandler) -> bool:
    if handler.type is None:
        return True
    types = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    names = {dotted_name(one).rpartition(".")[2] for one in types}
    # Of a name that is computed, or of a class of its own, nothing is known.
    return not names.isdisjoint(_CATCH) or "" in names


def _unfit_calls(
    nodes: Iterable[ast.AST], by_name: Mapping[str, StubMethod], defined: Collection[str], misfit: Misfit
) -> Iterator[Finding]:
    for node in nodes:
        if not isinstance(node, ast.Call):
            continue
        name = dotted_name(node.func)
        method = by_name.get(name)
        if method is None or name.partition(".")[0] in defined:
            continue
        starred = any(isinstance(one, ast.Starred) for one in node.args)
        named = [one.arg for one in node.keywords if one.arg is not None]
        if not starred and len(named) == len(node.keywords):
            reason = misfit(method.token, len(node.args), named)
            if reason is not None:
                yield Finding(line=node.lineno, text=reason)
                continue
        yield from _wrong_literals(node, method)


def _wrong_literals(call: ast.Call, method: StubMethod) -> Iterator[Finding]:
    signature = parse(f"def f{method.signature}: ...")
    if signature is None or not isinstance(signature.body[0], ast.FunctionDef):
        return
    parameters = signature.body[0].args
    positional = [*parameters.posonlyargs, *parameters.args]
    given = list(zip(positional, call.args, strict=False))
    if any(isinstance(one, ast.Starred) for one in call.args):
        given = []
    by_name = {one.arg: one for one in (*parameters.args, *parameters.kwonlyargs)}
    given += [
        (by_name[one.arg], one.value) for one in call.keywords if one.arg is not None and one.arg in by_name
    ]
    for parameter, value in given:
        if parameter.annotation is not None and _is_wrong(parameter.annotation, value):
            called, wanted = f"{method.name or method.path}{method.signature}", parameter.annotation
            text = f"{called}: {parameter.arg} is {_described(value)}, but must be {ast.unparse(wanted)}"
            yield Finding(line=value.lineno, text=text)


def _is_wrong(wanted: ast.expr | None, value: ast.expr) -> bool:
    """Whether a literal cannot be what a plain annotation says; of other annotations nothing is known."""
    if isinstance(wanted, ast.BinOp):
        return _is_wrong(wanted.left, value) and _is_wrong(wanted.right, value)
    if isinstance(wanted, ast.Constant) and wanted.value is None:
        return isinstance(value, _CONTAINERS) or (
            isinstance(value, ast.Constant) and value.value is not None and value.value is not ...
        )
    name = wanted.value if isinstance(wanted, ast.Subscript) else wanted
    match name.id if isinstance(name, ast.Name) else None:
        case "int" | "float":
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                return not _is_number(value.value)
            return isinstance(value, _CONTAINERS)
        case "str":
            return isinstance(value, _CONTAINERS)
        case "list" | "dict" | "List" | "Dict":
            return isinstance(value, ast.Constant) and isinstance(value.value, int | float | complex)
    return False


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _described(value: ast.expr) -> str:
    if isinstance(value, ast.Constant):
        text = ascii(value.value)
        return text if len(text) <= 40 else f"{text[:40]}…"
    if isinstance(value, ast.List | ast.ListComp):
        return "a list"
    return "a set" if isinstance(value, ast.Set | ast.SetComp) else "a dict"


def _unknown_names(nodes: Iterable[ast.AST], missing: Collection[str]) -> Iterator[Finding]:
    for node in nodes:
        if isinstance(node, ast.Name) and node.id in missing:
            yield Finding(line=node.lineno, text=f"name {node.id!r} is not defined")


def _may_define_names(tree: ast.Module) -> bool:
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id in _DEFINE:
            return True
        if isinstance(node, ast.ImportFrom) and any(alias.name == "*" for alias in node.names):
            return True
        if isinstance(node, ast.Import | ast.ImportFrom):
            modules = [getattr(node, "module", None) or "", *(alias.name for alias in node.names)]
            if any(module.partition(".")[0] in _DEFINE for module in modules):
                return True
    return False
