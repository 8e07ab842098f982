"""The table of operations that commands use without a gateway has the client's methods."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from inspect import Parameter
from typing import Any

import pytest

from nekro.cli.local_operations import CHAT, OPERATIONS, Operation
from nekro.extensions.mcp import commands
from nekro_client import AsyncClient

#: Sent with a request: a command in the process of the operations does not repeat it, and waits by itself.
_OF_REQUESTS = {"idempotency_key", "send.wait"}


def entries(table: Mapping[str, Any], path: str) -> Iterator[tuple[str, Operation]]:
    """Yield the operations of a table with the paths of the client's methods."""
    for name, found in table.items():
        if isinstance(found, Mapping):
            yield from entries(found, f"{path}{name}.")
        else:
            yield f"{path}{name}", found


ENTRIES = {
    **dict(entries({**OPERATIONS, **commands.OPERATIONS}, "")),
    **dict(entries(CHAT, "chat.")),
}


def method_of_client(path: str) -> inspect.Signature:
    found: Any = AsyncClient("http://gateway.invalid", "")
    for name in path.split("."):
        found = found.chat("one") if name == "chat" else getattr(found, name)
    return inspect.signature(found)


def signature_of(operation: Operation, *, bound: int) -> inspect.Signature:
    """Return the signature of an entry without its actor and ``bound`` further arguments."""
    signature = inspect.signature(operation.function)
    parameters = list(signature.parameters.values())[1 + bound :]
    if operation.body:
        *parameters, _ = parameters
        parameters += [
            Parameter(name, Parameter.KEYWORD_ONLY, default=Parameter.empty if field.is_required() else None)
            for name, field in operation.model.model_fields.items()
            if name not in operation.fields
        ]
    return signature.replace(parameters=parameters)


def is_required(parameter: Parameter) -> bool:
    return parameter.default is Parameter.empty


@pytest.mark.parametrize("path", ENTRIES)
def test_an_operation_takes_the_arguments_of_the_method_of_the_client(path: str) -> None:
    wanted = method_of_client(path).parameters
    given = signature_of(ENTRIES[path], bound=path.startswith("chat.")).parameters
    of_requests = {one.removeprefix(f"{path.rpartition('.')[2]}.") for one in _OF_REQUESTS}
    missing = wanted.keys() - given.keys() - of_requests
    assert not missing, f"{path} lacks {missing}"
    demanded = {name for name, parameter in given.items() if is_required(parameter)}
    assert demanded <= {name for name, parameter in wanted.items() if is_required(parameter)}
    positional = [name for name, one in wanted.items() if one.kind is Parameter.POSITIONAL_OR_KEYWORD]
    assert list(given)[: len(positional)] == positional


@pytest.mark.parametrize("path", ENTRIES)
def test_an_operation_answers_what_the_method_of_the_client_returns(path: str) -> None:
    wanted = str(method_of_client(path).return_annotation)
    answer = str(inspect.signature(ENTRIES[path].function).return_annotation).replace("models.", "")
    if ENTRIES[path].is_whole:
        answer = answer.replace("Page[", "list[")
    assert wanted in (answer, "None")  # what the client does not read, a command does not either
