"""Python client of the HTTP API; needs httpx and pydantic only.

>>> from nekro_client import Client
>>> client = Client("http://127.0.0.1:8600", key="")
>>> client.chat("web-1").key
'web-1'

Names are imported when they are first used: an import of ``nekro_client.models`` alone loads no httpx.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from nekro_client.async_chats import AsyncChat, AsyncEventStream
    from nekro_client.async_client import AsyncClient
    from nekro_client.async_connections import AsyncChangeStream, AsyncRunStream
    from nekro_client.chats import Chat, EventStream
    from nekro_client.client import Client
    from nekro_client.connections import ChangeStream, RunStream
    from nekro_client.errors import (
        ApiError,
        AuthenticationError,
        ClientError,
        ConflictError,
        ForbiddenError,
        InvalidAnswerError,
        InvalidRequestError,
        MethodFailedError,
        NotFoundError,
        RateLimitedError,
        UnavailableError,
        UnreachableError,
        WaitTimeoutError,
    )

__all__ = [
    "ApiError",
    "AsyncChangeStream",
    "AsyncChat",
    "AsyncClient",
    "AsyncEventStream",
    "AsyncRunStream",
    "AuthenticationError",
    "ChangeStream",
    "Chat",
    "Client",
    "ClientError",
    "ConflictError",
    "EventStream",
    "ForbiddenError",
    "InvalidAnswerError",
    "InvalidRequestError",
    "MethodFailedError",
    "NotFoundError",
    "RateLimitedError",
    "RunStream",
    "UnavailableError",
    "UnreachableError",
    "WaitTimeoutError",
]

#: Modules of the names above that are not errors.
_MODULES: Final = {
    "AsyncChat": "async_chats",
    "AsyncEventStream": "async_chats",
    "AsyncClient": "async_client",
    "AsyncChangeStream": "async_connections",
    "AsyncRunStream": "async_connections",
    "Chat": "chats",
    "EventStream": "chats",
    "Client": "client",
    "ChangeStream": "connections",
    "RunStream": "connections",
}
#: Modules that can be used after ``import nekro_client`` alone.
_SUBMODULES: Final = frozenset({"answer_limits", "errors", "models", "sse", *_MODULES.values()})


if not TYPE_CHECKING:  # a type checker would accept any name

    def __getattr__(name: str) -> object:
        if name in _SUBMODULES:
            return import_module(f"nekro_client.{name}")
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value: object = getattr(import_module(f"nekro_client.{_MODULES.get(name, 'errors')}"), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_SUBMODULES})
