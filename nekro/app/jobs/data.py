"""Conversion between a job's row and the values of Python and the SDK."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from loguru import logger
from pydantic_core import PydanticSerializationError, to_jsonable_python

from nekro.wire.values import decode_arguments, encode_value, pickled_for
from nekro_agent.errors import ArgumentError, ResultError
from nekro_agent.ports import JobInfo
from storage.repositories.jobs import Job

__all__ = ["MAX_ARGUMENT_BYTES", "info_of", "is_call", "pack", "plain_data", "unpack"]

#: Size limit of the arguments of a job or signal; larger data belong in files.
MAX_ARGUMENT_BYTES: Final = 8 << 20
#: Size limit of the data of a job's report.
MAX_DATA_CHARS: Final = 1 << 20
_FIELD: Final = "arguments"


def pack(args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, str]:
    """Encode arguments as a JSON value for a row; models, dataclasses and enums become plain data.

    Raises:
        ArgumentError: a value is not plain data, or the arguments together are too large.
    """
    try:
        encoded = encode_value([list(args), dict(kwargs)], max_bytes=MAX_ARGUMENT_BYTES)
    except ResultError as exc:
        raise ArgumentError(f"an argument cannot be passed to a background job: {exc}") from exc
    reason = pickled_for(encoded.decode())
    if reason is not None:
        raise ArgumentError(f"an argument cannot be passed to a background job: {reason}")
    packed = {_FIELD: encoded.decode()}
    unpack(packed)  # fail here, where the caller sees it; the job's worker could not report it
    return packed


def unpack(packed: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Decode the result of ``pack``.

    Raises:
        ArgumentError: it cannot be decoded.
    """
    args, kwargs = decode_arguments(packed[_FIELD], max_bytes=MAX_ARGUMENT_BYTES)
    return args, kwargs


def plain_data(value: Any) -> Any:
    """Convert a job's report to JSON values; a value that has no JSON form becomes its text."""
    if value is None:
        return None
    try:
        plain = to_jsonable_python(value, fallback=str, bytes_mode="base64", inf_nan_mode="constants")
        size = len(json.dumps(plain))
    except (PydanticSerializationError, ValueError, TypeError, RecursionError):
        return str(value)[:MAX_DATA_CHARS]
    if size > MAX_DATA_CHARS:
        logger.bind(chars=size, limit=MAX_DATA_CHARS).warning("job_data_dropped")
        return None
    return plain


def info_of(job: Job) -> JobInfo:
    """Return a job in the form that the SDK uses."""
    return JobInfo(
        id=job.id,
        plugin_key=job.plugin_key,
        task_type=job.type,
        task_id=job.task_id,
        chat_key=job.chat_key,
        state=job.state,
        percent=job.percent,
        message=job.message,
        data=job.data,
        cancel_requested=job.cancel_requested_at is not None,
    )


def is_call(job: Job) -> bool:
    """Whether the row shows the progress of a method's call, whose arguments are not stored."""
    return job.args is None
