"""Methods that send one request, written once for both clients."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Coroutine
from functools import wraps
from types import MethodType
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, TypeVar, cast, overload

from nekro_client.models import Page
from nekro_client.operations import Operation

if TYPE_CHECKING:
    from nekro_client.async_connections import AsyncConnection
    from nekro_client.connections import Connection

__all__ = ["Asynchronous", "Blocking", "request", "whole_list"]


P = ParamSpec("P")
T = TypeVar("T")


class Blocking:
    """A part of ``Client``: its requests return their answers."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection


class Asynchronous:
    """A part of ``AsyncClient``: its requests are coroutines."""

    def __init__(self, connection: AsyncConnection) -> None:
        self._connection = connection


class request(Generic[P, T]):
    """Makes a method that builds a request one that sends it and returns the answer."""

    def __init__(self, build: Callable[Concatenate[Any, P], Operation[T]]) -> None:
        self._build = build

    @overload
    def __get__(self, instance: Blocking, owner: type) -> Callable[P, T]: ...
    @overload
    def __get__(self, instance: Asynchronous, owner: type) -> Callable[P, Coroutine[Any, Any, T]]: ...
    @overload
    def __get__(self, instance: None, owner: type) -> Callable[Concatenate[Any, P], Operation[T]]: ...
    def __get__(self, instance: Blocking | Asynchronous | None, owner: type) -> Callable[..., Any]:
        """Return the method of an object; of the class what was decorated, for its documentation."""
        if instance is None:
            return self._build
        return _method(instance, self._build, instance._connection.send, answer="{}")


class whole_list(Generic[T]):
    """Makes a method that builds the request of a list's first page one that returns all its items."""

    def __init__(self, build: Callable[[Any], Operation[Page[T]]]) -> None:
        self._build = build

    @overload
    def __get__(self, instance: Blocking, owner: type) -> Callable[[], list[T]]: ...
    @overload
    def __get__(self, instance: Asynchronous, owner: type) -> Callable[[], Coroutine[Any, Any, list[T]]]: ...
    @overload
    def __get__(self, instance: None, owner: type) -> Callable[[Any], Operation[Page[T]]]: ...
    def __get__(self, instance: Blocking | Asynchronous | None, owner: type) -> Callable[..., Any]:
        """Return the method of an object; of the class what was decorated, for its documentation."""
        if instance is None:
            return self._build
        return _method(instance, self._build, instance._connection.all, answer="list[{}]")


def _method(
    instance: Blocking | Asynchronous, build: Callable[..., Any], send: Callable[[Any], Any], *, answer: str
) -> Callable[..., Any]:
    """Return the bound method that builds a request and sends it.

    Args:
        answer: the type that it returns, for ``help``; ``{}`` stands for the innermost one of the request's.
    """
    bound = MethodType(build, instance)

    @wraps(bound)
    def wait(*args: Any, **kwargs: Any) -> Any:
        return send(bound(*args, **kwargs))

    @wraps(bound)
    async def coroutine(*args: Any, **kwargs: Any) -> Any:
        return await send(bound(*args, **kwargs))

    method: Any = wait if isinstance(instance, Blocking) else coroutine
    signature = inspect.signature(bound)
    kind = signature.return_annotation.removeprefix("Operation[").removesuffix("]")
    if answer != "{}":
        kind = answer.format(kind.removeprefix("Page[").removesuffix("]"))
    method.__signature__ = signature.replace(return_annotation=kind)
    return cast("Callable[..., Any]", method)
