"""Keys and the record of administrative acts."""

from __future__ import annotations

import hmac
import json
import secrets
from datetime import datetime
from http import HTTPStatus
from typing import Annotated, Any

from fastapi import APIRouter, Query, Response
from fastapi.responses import JSONResponse

from broker_config.embedded import resolve_signing_key
from nekro.app.services import Services
from nekro.gateway.access.keys import create_key as create_stored_key
from nekro.gateway.access.keys import is_secret_of, key_text, new_key
from nekro.gateway.access.keys import revoke_key as revoke_stored_key
from nekro.gateway.dependencies import IdentityDep, PathText, RequestId, ServicesDep
from nekro.gateway.idempotency import Once, OnceDep, with_content
from nekro.gateway.views import act_answer, key_answer
from nekro.gateway.web.bodies import KeyedRoute
from nekro.gateway.web.paging import Cursor, Limit
from nekro.operations.actor import Identity, RefusedError, Scope
from nekro.operations.pages import cursor_of, number_of
from nekro_client.models import Act, ApiKey, CreatedKey, KeyBody, Page

__all__ = ["router"]

router = APIRouter(route_class=KeyedRoute, tags=["keys"])


@router.get("/keys")
async def list_keys(services: ServicesDep, identity: IdentityDep) -> Page[ApiKey]:
    """List every key, the oldest first, also revoked and expired ones, without secrets."""
    identity.require_all(Scope.ADMIN)
    async with services.database.read() as transaction:
        return Page(items=[key_answer(key) for key in await transaction.keys.all()])


@router.post("/keys", status_code=HTTPStatus.CREATED, response_model=CreatedKey)
async def create_key(
    body: KeyBody, services: ServicesDep, identity: IdentityDep, request_id: RequestId, once: OnceDep
) -> Response:
    """Create a key with at most the scopes and limits of the one that asks; its secret is shown only here.

    A limit of the key that asks must be stated for the new one, at most as high; otherwise the answer is 403
    `key_limited`.

    The secret is not stored: with an idempotency key it follows from that and the signing key, so the answer
    to a repetition has it again.
    """
    identity.require_all(Scope.ADMIN)
    scopes = {Scope(scope) for scope in body.scopes}
    more = scopes - identity.scopes
    if more:
        raise RefusedError(
            HTTPStatus.FORBIDDEN,
            "scope_missing",
            f"the key cannot give scopes that it lacks: {', '.join(sorted(more))}",
        )
    _require_within(body, identity)
    seed = _seed(services, once)

    async def work() -> ApiKey:
        new, _ = new_key(
            body.name,
            scopes=scopes,
            chats=body.chats,
            user_id=body.user_id,
            requests_per_minute=body.requests_per_minute,
            cost_per_day=body.cost_per_day,
            tokens_per_day=body.tokens_per_day,
            stored_bytes_limit=body.stored_bytes_limit,
            expires_at=body.expires_at,
            seed=seed,
        )
        return key_answer(
            await create_stored_key(services.database, new, by=identity.key_id, request_id=request_id)
        )

    answer = await once.respond(work, status=HTTPStatus.CREATED)
    return await _with_secret(services, answer, key_text(seed))


def _require_within(body: KeyBody, creator: Identity) -> None:
    """Return if no limit of the new key exceeds that of its creator, whose chats and users are all.

    Raises:
        RefusedError: 403, one does, or is not stated.
    """
    limits: tuple[tuple[str, Any, Any], ...] = (
        ("expires_at", body.expires_at, creator.expires_at),
        ("cost_per_day", body.cost_per_day, creator.cost_per_day),
        ("tokens_per_day", body.tokens_per_day, creator.tokens_per_day),
        # 0 does not limit these two.
        ("requests_per_minute", body.requests_per_minute or None, creator.requests_per_minute or None),
        ("stored_bytes_limit", body.stored_bytes_limit or None, creator.stored_bytes_limit or None),
    )
    for name, wanted, most in limits:
        if most is not None and (wanted is None or wanted > most):
            shown = most.isoformat() if isinstance(most, datetime) else most
            raise RefusedError(
                HTTPStatus.FORBIDDEN,
                "key_limited",
                f"the key cannot give more than it has: state {name}, at most {shown}",
            )


def _seed(services: Services, once: Once) -> bytes:
    """Return the secret that a new key derives from; a repeated request gets the same."""
    if once.name is None:
        return secrets.token_bytes(32)
    signing_key = resolve_signing_key(services.settings).get_secret_value()
    return hmac.digest(signing_key.encode(), f"nekro-workers api key 1\0{once.name}".encode(), "sha256")


async def _with_secret(services: Services, answer: JSONResponse, text: str) -> JSONResponse:
    shown = json.loads(bytes(answer.body))
    async with services.database.read() as transaction:
        key = await transaction.keys.get(shown["id"])
    if not is_secret_of(key, text):
        raise RefusedError(
            HTTPStatus.CONFLICT,
            "secret_unavailable",
            f"the signing key has changed since key {key.id} was created, so its secret cannot be shown"
            " again; revoke it and create another one",
        )
    return with_content(answer, {**shown, "key": text})


@router.delete("/keys/{key_id}")
async def revoke_key(
    key_id: PathText, services: ServicesDep, identity: IdentityDep, request_id: RequestId
) -> ApiKey:
    """Revoke a key, from the next request on; idempotent."""
    identity.require_all(Scope.ADMIN)
    return key_answer(
        await revoke_stored_key(services.database, key_id, by=identity.key_id, request_id=request_id)
    )


@router.get("/audit")
async def list_acts(
    services: ServicesDep,
    identity: IdentityDep,
    action: Annotated[
        str | None, Query(max_length=100, description="Only actions that begin with it: `dead_letter.`")
    ] = None,
    subject: Annotated[str | None, Query(max_length=2000, description="Only acts on this.")] = None,
    limit: Limit = 50,
    cursor: Cursor = None,
) -> Page[Act]:
    """List administrative acts, the newest first: who did what to what."""
    identity.require_all(Scope.ADMIN)
    before = None if cursor is None else number_of(cursor)
    async with services.database.read() as transaction:
        acts = await transaction.audit.newest(limit=limit, before=before, action=action, subject=subject)
    more = cursor_of(acts[-1].sequence) if len(acts) == limit else None
    return Page(items=[act_answer(act) for act in acts], next_cursor=more)
