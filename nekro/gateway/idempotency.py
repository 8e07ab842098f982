"""``Idempotency-Key``: a request with one runs once, and repetitions get its answer.

The row of a request is unique for key, method, path and idempotency key. The gateway that runs the request
holds a lease on the row. If it dies or stops in between, or an error leaves open whether the request had its
effect, the next repetition runs the request again, and the effect itself is single by
``IdempotentRequest.name``; a request whose effect has no such name ends with ``outcome_unknown`` then.

A message needs no such row: it is unique itself (``nekro.operations.posting.post_message``).
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from http import HTTPStatus
from typing import Annotated, Any, Final, TypeVar

from fastapi import Depends, Request
from fastapi.responses import JSONResponse
from loguru import logger
from pydantic import BaseModel

from nekro.app.leases import REQUEST, HeldLease, LeaseKeeper
from nekro.gateway.dependencies import identity_of
from nekro.gateway.problems import PROBLEM_TYPE, problem_of, status_of
from nekro.gateway.web.responses import JsonAnswer
from nekro.operations.actor import RefusedError, key_reused
from nekro.wire.invocation import new_id
from nekro_agent.errors import (
    BrokerUnavailableError,
    CallCancelledError,
    CallTimeoutError,
    FencedError,
    FilesQuotaError,
    MethodAbortedError,
    MethodFailedError,
    NekroError,
    OutcomeUnknownError,
    OverloadedError,
    ResultError,
    StorageError,
    StorageQuotaError,
)
from nekro_agent.execution.current import current_account
from nekro_agent.shared_clock import elapsed_seconds
from storage.accounts.stored_bytes import ROW_BYTES, size_of
from storage.engine import Database
from storage.repositories.leases import RecordedRequest
from storage.states import StoredKind

__all__ = [
    "NOT_ONCE",
    "REPLAYED",
    "IdempotentRequest",
    "OnceDep",
    "RepeatedProblem",
    "once_of",
]

M = TypeVar("M", bound=BaseModel)

_HEADER: Final = "idempotency-key"
_KEY: Final = re.compile(r"[\x21-\x7e](?:[\x20-\x7e]{0,253}[\x21-\x7e])?")
#: Characters of an id that ``new_id`` makes.
_ID_CHARS: Final = 32
#: How long a request stays with a gateway that died.
_LEASE_SECONDS: Final = 12.0
_HAD_EFFECT: Final = (
    CallCancelledError,
    CallTimeoutError,
    FilesQuotaError,
    MethodAbortedError,
    MethodFailedError,
    OutcomeUnknownError,
    ResultError,
)
#: ``openapi_extra`` of a POST without idempotency keys: its clients send none, or it stores nothing.
NOT_ONCE: Final[Mapping[str, Any]] = {"x-not-once": True}
#: Header of an answer that an earlier request got.
REPLAYED: Final = {"Idempotency-Replayed": "true"}


class RepeatedProblem(Exception):
    """Ends an operation whose first execution ended with a problem."""

    def __init__(self, response: JSONResponse) -> None:
        """``response`` is the answer of the first execution."""
        super().__init__()
        self.response = response


class IdempotentRequest:
    """One request, which runs once if it has an idempotency key."""

    def __init__(self, request: Request, *, name: str | None, body: bytes) -> None:
        """Create it; nothing runs yet.

        Args:
            name: digest of key, method, path and idempotency key, in hexadecimal; None without one.
            body: what a repetition must repeat.
        """
        self._request = request
        self._database: Database = request.app.state.services.database
        self._leases: LeaseKeeper = request.app.state.services.leases
        #: Names the effect, for deduplication keys and ids; None without an idempotency key.
        self.name = name
        #: SHA-256 of what a repetition must repeat.
        self.body_digest = hashlib.sha256(body).digest()
        #: Whether an earlier execution of the request may have had its effect; known when ``work`` runs.
        self.is_repetition = False
        #: Returns the status of an answer of ``run``.
        self.status_of: Callable[[Any], HTTPStatus] = lambda _: HTTPStatus.OK
        #: What the answer of ``run`` adds to a response.
        self.headers: Mapping[str, str] = {}

    async def run(self, kind: type[M], work: Callable[[], Awaitable[M]], *, is_repeatable: bool = True) -> M:
        """Return the answer of ``work``, or that of the execution before, as ``nekro.operations.actor.Once``.

        Raises:
            RepeatedProblem: the execution before ended with a problem.
            RefusedError, OutcomeUnknownError: as from ``respond``.
        """
        if self.name is None:
            return await work()
        answer = await self.respond(work, status=self.status_of, is_repeatable=is_repeatable)
        self.headers = _added(answer)
        if answer.status_code >= HTTPStatus.BAD_REQUEST:
            raise RepeatedProblem(answer)
        return kind.model_validate(json.loads(bytes(answer.body)))

    async def respond(
        self,
        work: Callable[[], Awaitable[BaseModel]],
        *,
        status: HTTPStatus | Callable[[Any], HTTPStatus] = HTTPStatus.OK,
        is_repeatable: bool = True,
    ) -> JSONResponse:
        """Return the answer of ``work``, or that of the execution before, as a response.

        Errors of a method that ran are answers, because it may have had its effect. After an error that
        refuses the work the request is forgotten. After any other one, and after a cancellation, a repetition
        runs the work again as such.

        Args:
            status: of the answer, or what returns it for an answer.
            is_repeatable: see ``run``.

        Raises:
            RefusedError: 422, the same key with another body; 409, the first execution still runs.
            OutcomeUnknownError: the first execution did not end, and the work is not repeatable.
        """
        if self.name is None:
            return _answer(await work(), status)
        digest, since = bytes.fromhex(self.name), elapsed_seconds()
        async with self._database.begin() as transaction:
            fence = await transaction.requests.begin(
                digest, body_digest=self.body_digest, lease_seconds=_LEASE_SECONDS
            )
            known = None if fence is not None else await transaction.requests.find(digest)
        if fence is None:
            return self._repeated(known)
        self.is_repetition = fence > 1
        if self.is_repetition and not is_repeatable:
            work = _unknown
        async with self._leases.hold(REQUEST, self.name, fence, seconds=_LEASE_SECONDS, since=since) as lease:
            return await self._run(lease, work, status)

    async def _run(
        self,
        lease: HeldLease,
        work: Callable[[], Awaitable[BaseModel]],
        status: HTTPStatus | Callable[[Any], HTTPStatus],
    ) -> JSONResponse:
        try:
            answer = _answer(await work(), status)
        except _HAD_EFFECT as exc:
            problem = problem_of(self._request, exc)
            await self._finish(lease, problem.status, problem.model_dump(mode="json"))
            raise
        except BaseException as exc:
            with suppress(StorageError), lease.ending():  # else the lease ends by itself
                async with self._database.autocommit() as transaction:
                    requests = transaction.requests
                    end = requests.forget if _had_no_effect(exc) else requests.abandon
                    await end(bytes.fromhex(lease.key), fence=lease.fence)
            raise
        await self._finish(lease, answer.status_code, json.loads(bytes(answer.body)))
        return answer

    async def _finish(self, lease: HeldLease, status: int, answer: Any) -> None:
        digest = bytes.fromhex(lease.key)
        try:
            with lease.ending():
                async with self._database.begin() as transaction:
                    is_ours = await transaction.requests.finish(
                        digest, fence=lease.fence, status=status, answer=answer
                    )
                    if not is_ours:
                        raise FencedError("another execution has taken the request")
                    size = ROW_BYTES + size_of(json.dumps(answer))
                    account_id = current_account()
                    transaction.stored_bytes.add(account_id, StoredKind.REQUESTS, size, refuses=False)
        except StorageError as exc:  # the work is done; a repetition finds its effect by name
            logger.bind(error=str(exc)).warning("idempotent_answer_not_stored")

    def _repeated(self, known: RecordedRequest | None) -> JSONResponse:
        if known is not None and known.body_digest != self.body_digest:
            raise key_reused()
        if known is None or known.status is None:
            raise RefusedError(
                HTTPStatus.CONFLICT,
                "idempotent_request_running",
                "the first request with this Idempotency-Key is still running",
                headers={"Retry-After": "1"},
            )
        kind = PROBLEM_TYPE if known.status >= HTTPStatus.BAD_REQUEST else None
        return JsonAnswer(known.answer, status_code=known.status, headers=REPLAYED, media_type=kind)

    @property
    def id(self) -> str:
        """An id for what the request creates: the same in each execution of it, else a new one."""
        return new_id() if self.name is None else self.name[:_ID_CHARS]


async def once_of(request: Request, *, body: bytes) -> IdempotentRequest:
    """Return a request by what a repetition must repeat, for bodies that are not read at once."""
    return IdempotentRequest(request, name=await _name(request), body=body)


def _added(answer: JSONResponse) -> dict[str, str]:
    """Return the headers of an answer that say that it was given before."""
    return {name: answer.headers[name] for name in REPLAYED if name in answer.headers}


async def _once(request: Request) -> IdempotentRequest:
    return await once_of(request, body=await request.body())


async def _name(request: Request) -> str | None:
    given = request.headers.getlist(_HEADER)
    if not given:
        return None
    if len(given) > 1 or not _KEY.fullmatch(given[0]):
        raise RefusedError(
            HTTPStatus.BAD_REQUEST,
            "idempotency_key_invalid",
            "an Idempotency-Key has 1 to 255 printable ASCII characters",
        )
    identity = await identity_of(request)
    parts = (identity.key_id or "", request.method, request.scope["path"], given[0])
    return hashlib.sha256("\0".join(parts).encode("utf-8", "surrogatepass")).hexdigest()


def _had_no_effect(error: BaseException) -> bool:
    """Whether an error says that nothing was done; a cancellation or an unavailable database does not."""
    if isinstance(error, RefusedError):
        return error.status < HTTPStatus.INTERNAL_SERVER_ERROR
    # What was sent will not run, and a transaction beyond the quota was undone.
    if isinstance(error, BrokerUnavailableError | OverloadedError | StorageQuotaError):
        return True
    return isinstance(error, NekroError) and status_of(error) < HTTPStatus.INTERNAL_SERVER_ERROR


async def _unknown() -> BaseModel:
    raise OutcomeUnknownError(
        "the first request with this Idempotency-Key ended without an answer, because its gateway stopped or"
        " the database failed; the work may have been done"
    )


def _answer(model: BaseModel, status: HTTPStatus | Callable[[Any], HTTPStatus]) -> JSONResponse:
    code = status(model) if callable(status) else status
    return JsonAnswer(model.model_dump(mode="json", by_alias=True), status_code=code)


OnceDep = Annotated[IdempotentRequest, Depends(_once)]
