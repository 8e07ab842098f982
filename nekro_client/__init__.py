"""Python client of the HTTP API; needs httpx and pydantic only.

>>> from nekro_client import Client
>>> client = Client("http://127.0.0.1:8600", key="")
>>> client.chat("web-1").key
'web-1'
"""

from nekro_client.async_chats import AsyncChat, AsyncEventStream
from nekro_client.chats import Chat, EventStream
from nekro_client.client import AsyncClient, Client
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
from nekro_client.runs import AsyncRunStream, RunStream
from nekro_client.streams import AsyncChangeStream, ChangeStream

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
