"""Bodies with files: written to disk while they arrive, within limits."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from http import HTTPStatus
from typing import BinaryIO, Final

from fastapi import Request
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException

from gateway.problems import ProblemError
from nekro_agent import layout
from nekro_agent.files.private_files import make_directory
from workers.composition import Services

__all__ = ["Form", "NewFile", "open_body", "open_form"]

#: Most files of one body, and most other fields.
MOST_FILES: Final = 32
_MOST_FIELDS: Final = 32
#: Largest field that is no file.
_FIELD_BYTES: Final = 1 << 20


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
        ProblemError: 400, it is not valid; 422, a field occurs twice.
    """
    try:
        form = request.form(max_files=MOST_FILES, max_fields=_MOST_FIELDS, max_part_size=_FIELD_BYTES)
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
