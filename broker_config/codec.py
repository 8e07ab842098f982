"""Values between sandbox and worker: what a sandbox sent is decoded, what a method returned encoded.

Sandbox to worker: a pickle that is read by ``pickle_subset``, never by ``pickle``. Worker to
sandbox: an ordinary pickle of protocol 4, because the sandbox may open whatever it likes.
"""

from __future__ import annotations

import pickle
from typing import Any, Final

from broker_config.pickle_limits import Budget
from broker_config.pickle_subset import load
from broker_config.returned_values import pickled
from nekro_agent.errors import ArgumentError

__all__ = ["decode_arguments", "decode_value", "encode_arguments", "encode_value"]

_PROTOCOL: Final = 4
_NOT_ARGUMENTS: Final = "the pickle holds something else than positional and named arguments"
_ARGUMENT_BUDGET: Final = Budget()
#: A worker's own value may be long; still it comes by way of the broker.
_VALUE_BUDGET: Final = Budget(
    nodes=1_000_000, opcodes=4_000_000, repeated_bytes=256 << 20, chosen_keys=50_000
)


def decode_arguments(data: bytes, *, max_bytes: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Read ``(args, kwargs)`` as a sandbox pickled them; builds plain values, whatever ``data`` holds.

    Raises:
        ArgumentError: a type that may not cross, a malformed pickle, or too much of anything.
    """
    _check_size(data, max_bytes, setting="NEKRO_SANDBOX__ARGUMENT_BYTES")
    value = load(data, _ARGUMENT_BUDGET)
    if type(value) is not tuple or len(value) != 2:
        raise ArgumentError(_NOT_ARGUMENTS)
    args, kwargs = value
    if type(args) is not tuple or type(kwargs) is not dict or not all(type(name) is str for name in kwargs):
        raise ArgumentError(_NOT_ARGUMENTS)
    return args, kwargs


def decode_value(data: bytes, *, max_bytes: int) -> object:
    """Read a method's value outside the sandbox, to show it; paths come as text.

    Raises:
        ArgumentError: it holds a class of the plugin's, or anything else that is no plain value.
    """
    _check_size(data, max_bytes, setting="NEKRO_SANDBOX__RETURN_BYTES")
    try:
        return load(data, _VALUE_BUDGET)
    except ArgumentError as exc:
        raise ArgumentError(f"the value opens in a sandbox only: {exc}") from None


def encode_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    """Pickle arguments as sandboxed code would.

    Raises:
        ArgumentError: a worker would refuse them, but for their size.
    """
    try:
        data = pickle.dumps((tuple(args), dict(kwargs)), _PROTOCOL)
    except Exception as exc:
        raise ArgumentError(f"an argument cannot be sent: {exc}") from exc
    load(data, _ARGUMENT_BUDGET)
    return data


def encode_value(value: object, *, max_bytes: int) -> bytes:
    """Pickle what a method returned, for the sandbox to open.

    Pydantic models and dataclasses become dicts, Enum members their values, at any depth of
    containers. An instance of another class crosses as it is; where the sandbox lacks the class,
    code there sees its attributes.

    Raises:
        ResultError: it is too large, holds something that must stay on the worker (a context,
            settings, a session, an open file), or cannot be pickled; the message names what and where.
    """
    return pickled(value, max_bytes=max_bytes)


def _check_size(data: bytes, max_bytes: int, *, setting: str) -> None:
    if len(data) > max_bytes:
        raise ArgumentError(
            f"the value has {len(data)} bytes pickled, at most {max_bytes} can be sent ({setting}); "
            "write large data to a file in ./shared and send its path"
        )
