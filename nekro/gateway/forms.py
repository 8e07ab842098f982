"""Bodies with files: written to disk while they arrive, within limits."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any, BinaryIO, Final

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser

from nekro.app.chats.attachments import Attachment
from nekro.app.services import Services
from nekro.gateway.dependencies import identity_of
from nekro.gateway.web.bodies import require_few_values
from nekro.operations.actor import RefusedError
from nekro.operations.admission import KeyFiles, require_room
from nekro_agent import layout
from nekro_agent.files.names import stated_name
from nekro_agent.files.private_files import make_directory, open_unnamed
from nekro_agent.files.safe_files import sha256_of
from nekro_client.models import MessageBody, NewPart, NewTextPart

__all__ = [
    "BYTES_BODY",
    "FILES_BODY",
    "MESSAGE_BODY",
    "Form",
    "MessageForm",
    "NewFile",
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
#: By this parameter the parser knows a file.
_FILE: Final = b'; filename="file"'


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

FILES_BODY: Final[dict[str, Any]] = {
    "required": True,
    "content": {
        "multipart/form-data": {
            "schema": {
                "type": "object",
                "properties": {"file": {"type": "array", "items": {"type": "string", "format": "binary"}}},
                "required": ["file"],
            }
        }
    },
}
BYTES_BODY: Final[dict[str, Any]] = {
    "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
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
async def open_form(request: Request, services: Services) -> AsyncIterator[Form]:
    """Read a ``multipart/form-data`` body, or none of another kind; its files are removed at the end.

    Raises:
        StorageQuotaError: the key has no room for it.
        RefusedError: 400, it is not valid or not complete; 422, a field occurs twice.
    """
    await _require_room(request, services)
    if not _is_form(request):
        yield Form(fields={}, files=())
        return
    parser = _FormParser(
        request.headers,
        _ended(request),
        directory=_staging(services) if services.settings.files.in_store else None,
        max_files=MOST_FILES,
        max_fields=_MOST_FIELDS,
        max_part_size=_FIELD_BYTES,
    )
    try:
        form = await parser.parse()
    except MultiPartException as exc:
        raise RefusedError(HTTPStatus.BAD_REQUEST, "invalid_request", exc.message) from exc
    try:
        fields: dict[str, str] = {}
        files: list[NewFile] = []
        for (name, value), stated in zip(form.multi_items(), parser.stated_names, strict=True):
            if isinstance(value, UploadFile):
                file = await asyncio.to_thread(_on_disk, value)
                files.append(NewFile(name=stated or value.filename or name, file=file))
            elif name in fields:
                detail = f"the field {name!r} occurs twice"
                raise RefusedError(HTTPStatus.UNPROCESSABLE_ENTITY, "invalid_request", detail)
            else:
                fields[name] = value
        yield Form(fields=fields, files=files)
    finally:
        await form.close()


def _is_form(request: Request) -> bool:
    kind = request.headers.get("content-type", "").partition(";")[0]
    return kind.strip().lower() == "multipart/form-data"


async def _ended(request: Request) -> AsyncGenerator[bytes, None]:
    """Yield the body of a form; the parser would leave out a part without an end, and lose its file.

    Raises:
        MultiPartException: the form has no end.
    """
    tail = b""
    async for piece in request.stream():
        tail = (tail + piece)[-_TAIL_BYTES:]
        yield piece
    if not tail.rstrip(b" \t\r\n").endswith(b"--"):
        raise MultiPartException("the form has no end")


class _FormParser(MultiPartParser):
    """Knows files by ``filename*`` too, and reads their names as those of downloads."""

    def __init__(self, *args: Any, directory: Path | None, **limits: Any) -> None:
        """
        Args:
            directory: where files are written that a store takes over; None: in memory, and where the
                system has temporary files.
        """
        super().__init__(*args, **limits)
        self._directory = directory
        #: Of each part, in order; None: it is no file, or states no name.
        self.stated_names: list[str | None] = []
        self._stated: str | None = None
        self._field = self._value = b""

    def on_part_begin(self) -> None:
        """Begin a part."""
        self._stated = None
        super().on_part_begin()

    def on_header_field(self, data: bytes, start: int, end: int) -> None:
        """Take a piece of a header's name."""
        self._field += data[start:end]
        super().on_header_field(data, start, end)

    def on_header_value(self, data: bytes, start: int, end: int) -> None:
        """Take a piece of a header's value."""
        self._value += data[start:end]
        super().on_header_value(data, start, end)

    def on_header_end(self) -> None:
        """End a header; a part that states a file name becomes a file for the parser."""
        if self._field.lower() == b"content-disposition":
            self._stated = stated_name(self._value)
            if self._stated is not None:
                super().on_header_value(_FILE, 0, len(_FILE))
        self._field = self._value = b""
        super().on_header_end()

    def on_headers_finished(self) -> None:
        """End the headers of a part."""
        super().on_headers_finished()
        if self._directory is not None and self._current_part.file is not None:
            self._files_to_close_on_error.pop().close()
            self._current_part.file.file = open_unnamed(self._directory)
            self._files_to_close_on_error.append(self._current_part.file.file)  # type: ignore[arg-type]

    def on_part_end(self) -> None:
        """End a part."""
        self.stated_names.append(self._stated)
        super().on_part_end()


def _on_disk(upload: UploadFile) -> BinaryIO:
    """Return an upload as a file with a descriptor, at its start; small ones are still in memory."""
    upload.file.fileno()
    upload.file.flush()
    upload.file.seek(0)
    return upload.file


@dataclass(frozen=True, kw_only=True)
class MessageForm:
    """A person's message as it was posted."""

    body: MessageBody
    #: Text and parts of the body, in order.
    parts: Sequence[NewPart]
    files: Sequence[NewFile]
    #: The same for a repetition of the request, also if it was encoded in another way.
    digest: bytes


@asynccontextmanager
async def open_message(request: Request, services: Services) -> AsyncIterator[MessageForm]:
    """Read the body of a message: JSON, or a form with files.

    Raises:
        StorageQuotaError: the key has no room for it.
        RefusedError: 400, it is not valid JSON or no valid form; 415, it is neither; 422, it is empty.
        RequestValidationError: a field is not valid.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if _is_form(request):
        async with open_form(request, services) as form:
            yield await _new_message(_of_form(form.fields), form.files)
    elif kind == "application/json" or kind.endswith("+json"):
        yield await _new_message(_checked(_parsed(await request.body())), ())
    else:
        detail = "send application/json, or multipart/form-data with files"
        raise RefusedError(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "unsupported_media_type", detail)


async def store_files(uploads: KeyFiles, files: Sequence[NewFile]) -> list[Attachment]:
    """Store files in a chat's uploads, in order; the chat is created if it is new.

    Raises:
        StorageQuotaError, InvalidValueError, UploadQuotaError: as from ``KeyFiles.add``.
    """
    return [await uploads.add(part.name, part.file) for part in files]


async def _new_message(body: MessageBody, files: Sequence[NewFile]) -> MessageForm:
    parts = [*([NewTextPart(text=body.text)] if body.text else []), *body.parts]
    if not files and all(isinstance(part, NewTextPart) and not part.text.strip() for part in parts):
        detail = "the message is empty; send text, parts or files"
        raise RefusedError(HTTPStatus.UNPROCESSABLE_ENTITY, "invalid_request", detail)
    text = json.dumps(body.model_dump(), sort_keys=True).encode()
    digest = hashlib.sha256(text + await digest_of(files)).digest()
    return MessageForm(body=body, parts=parts, files=files, digest=digest)


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
            raise RefusedError(HTTPStatus.UNPROCESSABLE_ENTITY, "invalid_request", detail) from exc
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
    """Write a body to a file below the data directory while it arrives; the file is removed at the end.

    Raises:
        StorageQuotaError: the key has no room for it.
    """
    await _require_room(request, services)
    directory = _staging(services)
    with open_unnamed(directory) as file:
        async for piece in request.stream():
            if piece:
                await asyncio.to_thread(file.write, piece)
        await asyncio.to_thread(file.flush)
        file.seek(0)
        yield file


def _staging(services: Services) -> Path:
    return make_directory(layout.staging_dir(services.settings.data_dir))


async def _require_room(request: Request, services: Services) -> None:
    """Return if the key may store a body of the stated length, before the body is read."""
    stated = request.headers.get("content-length", "")
    await require_room(services, await identity_of(request), int(stated) if stated.isdigit() else 0)
