"""Routes over operations: the parameters of an operation are those of its route."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from dataclasses import fields
from http import HTTPStatus
from typing import Annotated, Any, get_args, get_origin

from fastapi import APIRouter, Depends, Query, Request, Response
from pydantic import BaseModel

from nekro.gateway.dependencies import IdentityDep, PathText, ServicesDep
from nekro.gateway.idempotency import IdempotentRequest, OnceDep, RepeatedProblem
from nekro.gateway.web.responses import JsonAnswer
from nekro.operations.actor import Actor
from nekro.operations.pages import Param

__all__ = ["ActorDep", "OnceActorDep", "route"]


async def _actor(request: Request, services: ServicesDep, identity: IdentityDep) -> Actor:
    return Actor(services=services, identity=identity, request_id=request.state.request_id)


async def _once_actor(request: Request, services: ServicesDep, identity: IdentityDep, once: OnceDep) -> Actor:
    return Actor(services=services, identity=identity, request_id=request.state.request_id, once=once)


#: Who makes a request.
ActorDep = Annotated[Actor, Depends(_actor)]
#: Who makes a request that may have an idempotency key.
OnceActorDep = Annotated[Actor, Depends(_once_actor)]


def route(
    router: APIRouter,
    method: str,
    path: str,
    operation: Callable[..., Awaitable[BaseModel]],
    *,
    status: HTTPStatus = HTTPStatus.OK,
    status_of: Callable[[Any], HTTPStatus] | None = None,
    **options: Any,
) -> None:
    """Serve an operation.

    Its argument ``actor`` is who makes the request; those that ``path`` names come from there; a model is the
    body; all others are of the query, as their ``Param`` says. A POST takes an idempotency key.

    Args:
        status: of the answer.
        status_of: returns the status of an answer that may have others than ``status``.
        options: further arguments of ``APIRouter.add_api_route``.
    """
    signature = inspect.signature(operation, eval_str=True)
    actor = OnceActorDep if method == "POST" else ActorDep

    async def endpoint(**given: Any) -> Response:
        once = given["actor"].once
        if isinstance(once, IdempotentRequest):
            once.status_of = status_of or (lambda _: status)
        try:
            answer = await operation(**given)
        except RepeatedProblem as exc:
            return exc.response
        content = answer.model_dump(mode="json", by_alias=True)
        return JsonAnswer(
            content,
            status_code=status if status_of is None else status_of(answer),
            headers=once.headers if isinstance(once, IdempotentRequest) else None,
        )

    parameters = [
        one.replace(
            kind=inspect.Parameter.KEYWORD_ONLY,
            annotation=actor if one.name == "actor" else _annotation(one, path),
        )
        for one in signature.parameters.values()
    ]
    # FastAPI reads what a route takes from its signature.
    endpoint.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    endpoint.__doc__ = operation.__doc__
    router.add_api_route(
        path,
        endpoint,
        methods=[method],
        name=operation.__name__,
        status_code=status,
        response_model=signature.return_annotation,
        **options,
    )


def _annotation(parameter: inspect.Parameter, path: str) -> Any:
    """Return the annotation of an operation's parameter as FastAPI reads it."""
    if f"{{{parameter.name}}}" in path:
        return PathText
    if get_origin(parameter.annotation) is not Annotated:
        return parameter.annotation
    kind, *markers = get_args(parameter.annotation)
    return Annotated[(kind, *map(_marker, markers))]


def _marker(marker: Any) -> Any:
    if not isinstance(marker, Param):
        return marker
    return Query(**{one.name: getattr(marker, one.name) for one in fields(Param)})
