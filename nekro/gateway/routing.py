"""The route of the API: it knows who asks before it reads the body."""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine
from http import HTTPStatus
from typing import Any, Final

from fastapi import Request, Response
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException

from nekro.gateway.dependencies import identity_of

__all__ = ["KeyedRoute", "require_few_values"]

#: Bodies up to this length cannot have enough values to matter.
_SHORT_BYTES: Final = 2 << 20
#: Most values of a longer body, which should be long because of its files. A value takes 50 to 100 bytes.
_MOST_VALUES: Final = 1_000_000


class KeyedRoute(APIRoute):
    """A route that refuses a request without a key before it reads the body.

    FastAPI reads and parses a body before it resolves dependencies, so a dependency is too late.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return the handler of requests."""
        handle = super().get_route_handler()

        async def identified(request: Request) -> Response:
            await identity_of(request)
            response = await handle(_LimitedRequest(request.scope, request.receive))
            response.headers.update(getattr(request.state, "rate_headers", {}))
            return response

        return identified


class _LimitedRequest(Request):
    """A request whose JSON has a limited number of values."""

    async def json(self) -> Any:
        """Return the parsed body.

        Raises:
            HTTPException: 413, it has too many values; 400, the parser cannot read it.
            JSONDecodeError: it is no JSON.
        """
        require_few_values(await self.body())
        try:
            return await super().json()
        except json.JSONDecodeError:
            raise
        except UnicodeDecodeError as exc:
            raise HTTPException(HTTPStatus.BAD_REQUEST, "the body is not UTF-8") from exc
        except RecursionError as exc:
            raise HTTPException(HTTPStatus.BAD_REQUEST, "the body is nested too deeply") from exc
        except ValueError as exc:  # the only other one: a limit of Python
            raise HTTPException(HTTPStatus.BAD_REQUEST, "a number of the body has too many digits") from exc


def require_few_values(body: bytes) -> None:
    """Return if a JSON text may be parsed: a few bytes of it may take a hundred in memory.

    Raises:
        HTTPException: 413, it has too many values.
    """
    if len(body) > _SHORT_BYTES and sum(map(body.count, (b",", b"[", b"{"))) > _MOST_VALUES:
        raise HTTPException(
            HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"the body has more than {_MOST_VALUES} values"
        )
