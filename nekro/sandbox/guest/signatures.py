"""Parse the signatures of stubs from the catalogue's text."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import ast
    import inspect
    from typing import Any

__all__ = ["parse_signature"]


class Written:
    """A default value that only the worker can evaluate; shown as source text."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text


def parse_signature(text: str) -> inspect.Signature:
    """Parse ``(text: str, times: int = 1) -> str`` into a signature; annotations stay text.

    Raises:
        AttributeError: it has not the form of a ``def``; ``inspect`` then falls back.
    """
    # Imported on demand: most code needs no signature, and `inspect` is slow to import.
    import ast
    import inspect

    try:
        tree = ast.parse(f"def f{text}: pass").body[0]
    except SyntaxError as exc:
        raise AttributeError("__signature__") from exc
    if not isinstance(tree, ast.FunctionDef):
        raise AttributeError("__signature__")
    kinds = inspect.Parameter
    spec = tree.args
    positional: list[tuple[ast.arg, Any]] = [(arg, kinds.POSITIONAL_ONLY) for arg in spec.posonlyargs]
    positional += [(arg, kinds.POSITIONAL_OR_KEYWORD) for arg in spec.args]
    padding: list[ast.expr | None] = [None] * (len(positional) - len(spec.defaults))
    parameters = [
        make_parameter(arg, kind, value)
        for (arg, kind), value in zip(positional, padding + list(spec.defaults), strict=True)
    ]
    if spec.vararg:
        parameters.append(make_parameter(spec.vararg, kinds.VAR_POSITIONAL, None))
    for arg, value in zip(spec.kwonlyargs, spec.kw_defaults, strict=True):
        parameters.append(make_parameter(arg, kinds.KEYWORD_ONLY, value))
    if spec.kwarg:
        parameters.append(make_parameter(spec.kwarg, kinds.VAR_KEYWORD, None))
    returns = ast.unparse(tree.returns) if tree.returns else inspect.Signature.empty
    return inspect.Signature(parameters, return_annotation=returns)


def make_parameter(arg: ast.arg, kind: Any, default: ast.expr | None) -> inspect.Parameter:
    """Build one parameter."""
    import ast
    import inspect

    value: Any = inspect.Parameter.empty
    if default is not None:
        try:
            value = ast.literal_eval(default)
        except ValueError:
            value = Written(ast.unparse(default))
    annotation = ast.unparse(arg.annotation) if arg.annotation else inspect.Parameter.empty
    return inspect.Parameter(arg.arg, kind, default=value, annotation=annotation)
