"""Bodies with files: written to disk while they arrive, within limits."""

from __future__ import annotations

import asyncio
import hashlib
import json
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, BinaryIO, Final

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.formparsers import MultiPartException
from starlette.types import Message

from gateway.problems import ProblemError
from gateway.routing import require_few_values
from nekro_agent import layout
from nekro_agent.files.private_files import make_directory
from nekro_agent.files.safe_files import sha256_of
from nekro_client.models import MessageBody, NewPart, NewTextPart
from workers.chats.attachments import Attachment
from workers.composition import Services

__all__ = [
    "MESSAGE_BODY",
    "Form",
    "NewFile",
    "NewMessage",
    "digest_of",
    "open_body",
    "open_form",
    "open_message",
    "store_files",
]

#: Most files of one body, and most other fields.
MOST_FILES: Final = 32
_MOST_FIELDS: Final = 32
#: Enough of a form's end to see its last boundary, which ends in ``--``.
_TAIL_BYTES: Final = 64
#: Largest field that is not a file.
_FIELD_BYTES: Final = 1 << 20


def _message_schema() -> dict[str, Any]:
    """Return the schema of a message without references, which the OpenAPI document would not resolve."""
    schema = MessageBody.model_json_schema()
    known = schema.pop("$defs", {})

    def inlined(value: Any) -> Any:
        if isinstance(value, list):
            return [inlined(item) for item in value]
        if not isinstance(value, dict):
            return value
        if "$ref" in value:
            return inlined(known[value["$ref"].rpartition("/")[2]])
        return {name: inlined(item) for name, item in value.items() if name != "discriminator"}

    found: dict[str, Any] = inlined(schema)
    return found


#: Body of a message, for the OpenAPI document.
MESSAGE_BODY: Final[dict[str, Any]] = {
    "required": True,
    "content": {
        "application/json": {"schema": _message_schema()},
        "multipart/form-data": {
            "schema": {
                "type": "object",
                "description": "The fields of the JSON form, and any number of files.",
                "properties": {
                    "text": {"type": "string"},
                    "user_id": {"type": "string"},
                    "user_name": {"type": "string"},
                    "to_agent": {"type": "boolean"},
                    "parts": {"type": "string", "description": "The parts, as JSON."},
                    "file": {"type": "array", "items": {"type": "string", "format": "binary"}},
                },
            }
        },
    },
}


@dataclass(frozen=True, kw_only=True)
class NewFile:
    """A file of a body; it is open until the form is closed."""

    #: As the client states it.
    name: str
    file: BinaryIO


@dataclass(frozen=True, kw_only=True)
class Form:
    """A body of fields and files, in order."""

    fields: dict[str, str]
    files: Sequence[NewFile]


@asynccontextmanager
async def open_form(request: Request) -> AsyncIterator[Form]:
    """Read a ``multipart/form-data`` body; its files are removed at the end.

    Raises:
        ProblemError: 400, it is not valid or not complete; 422, a field occurs twice.
    """
    tail = b""

    async def receive() -> Message:
        nonlocal tail
        message = await request.receive()
        tail = (tail + message.get("body", b""))[-_TAIL_BYTES:]
        is_last = message["type"] == "http.request" and not message.get("more_body", False)
        if is_last and not tail.rstrip(b" \t\r\n").endswith(b"--"):
            # The parser leaves out a part without an end; a message must not lose a file in that way.
            raise MultiPartException("the form has no end")
        return message

    try:
        form = Request(request.scope, receive).form(
            max_files=MOST_FILES, max_fields=_MOST_FIELDS, max_part_size=_FIELD_BYTES
        )
        async with form as parts:
            fields: dict[str, str] = {}
            files: list[NewFile] = []
            for name, value in parts.multi_items():
                if isinstance(value, UploadFile):
                    file = await asyncio.to_thread(_on_disk, value)
                    files.append(NewFile(name=value.filename or name, file=file))
                elif name in fields:
                    detail = f"the field {name!r} occurs twice"
                    raise ProblemError(HTTPStatus.UNPROCESSABLE_ENTITY, "invalid_request", detail)
                else:
                    fields[name] = value
            yield Form(fields=fields, files=files)
    except HTTPException as exc:
        raise ProblemError(HTTPStatus.BAD_REQUEST, "invalid_request", str(exc.detail)) from exc


def _on_disk(upload: UploadFile) -> BinaryIO:
    """Return an upload as a file with a descriptor, at its start; small ones are still in memory."""
    upload.file.fileno()
    upload.file.flush()
    upload.file.seek(0)
    return upload.file


@dataclass(frozen=True, kw_only=True)
class NewMessage:
    """A person's message as it was posted."""

    body: MessageBody
    #: Text and parts of the body, in order.
    parts: Sequence[NewPart]
    files: Sequence[NewFile]
    #: The same for a repetition of the request, also if it was encoded in another way.
    digest: bytes


@asynccontextmanager
async def open_message(request: Request) -> AsyncIterator[NewMessage]:
    """Read the body of a message: JSON, or a form with files.

    Raises:
        ProblemError: 400, it is not valid JSON or no valid form; 415, it is neither; 422, it is empty.
        RequestValidationError: a field is not valid.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind == "multipart/form-data":
        async with open_form(request) as form:
            yield await _new_message(_of_form(form.fields), form.files)
    elif kind == "application/json" or kind.endswith("+json"):
        yield await _new_message(_checked(_parsed(await request.body())), ())
    else:
        detail = "send application/json, or multipart/form-data with files"
        raise ProblemError(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "unsupported_media_type", detail)


async def store_files(services: Services, chat_key: str, files: Sequence[NewFile]) -> list[Attachment]:
    """Store files in a chat's uploads, in order; the chat is created if it is new.

    Raises:
        InvalidValueError, UploadQuotaError: as from ``ChatFiles.add``.
    """
    if not files:
        return []
    area = services.files_of(await services.chat(chat_key))
    return [await asyncio.to_thread(area.add, part.name, part.file) for part in files]


async def _new_message(body: MessageBody, files: Sequence[NewFile]) -> NewMessage:
    parts = [*([NewTextPart(text=body.text)] if body.text else []), *body.parts]
    if not files and all(isinstance(part, NewTextPart) and not part.text.strip() for part in parts):
        detail = "the message is empty; send text, parts or files"
        raise ProblemError(HTTPStatus.UNPROCESSABLE_ENTITY, "invalid_request", detail)
    text = json.dumps(body.model_dump(), sort_keys=True).encode()
    digest = hashlib.sha256(text + await digest_of(files)).digest()
    return NewMessage(body=body, parts=parts, files=files, digest=digest)


async def digest_of(files: Sequence[NewFile]) -> bytes:
    """Return what names and contents of files identify; empty without files."""
    digest = b""
    for file in files:
        content = await asyncio.to_thread(sha256_of, file.file)
        file.file.seek(0)
        digest += f"{len(file.name)}:{file.name}:{content}".encode("utf-8", "surrogatepass")
    return digest


def _of_form(fields: Mapping[str, str]) -> MessageBody:
    """Return the body of a form: the fields of the JSON form, with ``parts`` as JSON text."""
    values: dict[str, Any] = dict(fields)
    if "parts" in values:
        try:
            values["parts"] = json.loads(values["parts"])
        except (ValueError, RecursionError) as exc:
            detail = f"parts: it is not valid JSON: {exc}"
            raise ProblemError(HTTPStatus.UNPROCESSABLE_ENTITY, "invalid_request", detail) from exc
    return _checked(values)


def _parsed(body: bytes) -> object:
    # The parser of the standard library also takes lone surrogates, which a chat may contain.
    require_few_values(body)
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as exc:
        fault = {"type": "json_invalid", "loc": ("body",), "msg": f"it is not valid JSON: {exc}"}
        raise RequestValidationError([fault]) from exc


def _checked(value: object) -> MessageBody:
    try:
        return MessageBody.model_validate(value)
    except ValidationError as exc:
        faults = [{**error, "loc": ("body", *error["loc"])} for error in exc.errors(include_url=False)]
        raise RequestValidationError(faults) from exc


@asynccontextmanager
async def open_body(request: Request, services: Services) -> AsyncIterator[BinaryIO]:
    """Write a body to a file below the data directory while it arrives; the file is removed at the end."""
    directory = make_directory(layout.staging_dir(services.settings.data_dir))
    with tempfile.TemporaryFile(dir=directory) as file:
        async for piece in request.stream():
            if piece:
                await asyncio.to_thread(file.write, piece)
        await asyncio.to_thread(file.flush)
        file.seek(0)
        yield file
