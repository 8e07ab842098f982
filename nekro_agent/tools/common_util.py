"""Small helper functions that plugins of the reference use."""

from __future__ import annotations

import asyncio
import base64
import difflib
import hashlib
from collections import Counter
from pathlib import Path
from typing import BinaryIO, Final

from nekro_agent import runtime
from nekro_agent.errors import InvalidValueError
from nekro_agent.files import staging
from nekro_agent.files.areas import copy_in, safe_basename, shared_place
from nekro_agent.files.file_system import decode_data_url, is_data_url
from nekro_agent.files.private_files import make_directory, open_private
from nekro_agent.files.uploads import UploadArea, area_of
from nekro_agent.tools.path_convertor import convert_filename_to_access_path

__all__ = [
    "calculate_file_md5",
    "calculate_text_similarity",
    "copy_to_upload_dir",
    "download_file",
    "download_file_from_base64",
    "download_file_from_bytes",
    "limited_text_output",
]

#: Longest texts that ``difflib`` compares.
_MOST_COMPARED_CHARS: Final = 1000


async def download_file(
    url: str,
    file_path: str | Path | None = None,
    file_name: str = "",
    use_suffix: str = "",
    retry_count: int = 3,
    from_chat_key: str = "",
) -> tuple[str, str]:
    """Download a URL to ``file_path``, or into a chat's uploads.

    Args:
        file_name: name in the uploads; "" uses the URL's digest and ``use_suffix``.
        retry_count: attempts after the first.

    Returns:
        The host path and the file's name.

    Raises:
        InvalidValueError: neither ``file_path`` nor ``from_chat_key`` is given.
        DownloadError: every attempt failed.
    """
    # Imported here: it imports httpcore, and most processes download nothing.
    from nekro_agent.downloads.download import fetch

    target: str | Path
    if file_path is not None:
        target = file_path
    else:
        digest = hashlib.md5(url.encode(), usedforsecurity=False).hexdigest()
        target = _upload_target(from_chat_key, file_name or digest + use_suffix)
    for rest in range(max(retry_count, 0), -1, -1):
        try:
            await fetch(url, target)
            break
        except Exception as exc:
            if rest == 0 or not getattr(exc, "retryable", False):
                raise
            await asyncio.sleep(0.2)
    return str(target), Path(target).name


async def download_file_from_bytes(
    bytes_data: bytes,
    file_path: str | Path | None = None,
    file_name: str = "",
    use_suffix: str = "",
    from_chat_key: str = "",
) -> tuple[str, str]:
    """Write bytes to ``file_path``, or into a chat's uploads; returns host path and name.

    Raises:
        InvalidValueError: neither ``file_path`` nor ``from_chat_key`` is given.
    """
    if file_path is not None:
        target = Path(file_path)
        files = staging.files_of_call()
        if isinstance(file_path, str) and files is not None:
            files.require_target(file_path)
        await asyncio.to_thread(_write, target, bytes_data)
        return str(target), target.name
    digest = hashlib.md5(bytes_data, usedforsecurity=False).hexdigest()
    target = _upload_target(from_chat_key, file_name or digest + use_suffix)
    await asyncio.to_thread(UploadArea(target.parent).put, target.name, bytes_data)
    return str(target), target.name


async def download_file_from_base64(
    base64_str: str,
    file_path: str | Path | None = None,
    file_name: str = "",
    use_suffix: str = "",
    from_chat_key: str = "",
) -> tuple[str, str]:
    """Write what base64 text or a ``data:`` URL encodes; as :func:`download_file_from_bytes`.

    Args:
        use_suffix: "" means that of the URL's media type.

    Raises:
        InvalidValueError: the text is not valid, or neither ``file_path`` nor ``from_chat_key`` is given.
    """
    if is_data_url(base64_str):
        content, suffix = decode_data_url(base64_str.strip())
        return await download_file_from_bytes(
            content, file_path, file_name, use_suffix or suffix, from_chat_key
        )
    try:
        content = base64.b64decode("".join(base64_str.removeprefix("base64://").split()), validate=True)
    except ValueError as exc:
        raise InvalidValueError(f"the text is not valid base64: {exc}") from exc
    return await download_file_from_bytes(content, file_path, file_name, use_suffix, from_chat_key)


async def copy_to_upload_dir(
    file_path: str | Path, file_name: str = "", use_suffix: str = "", from_chat_key: str = ""
) -> tuple[str, str]:
    """Copy a host file into a chat's uploads; returns host path and name.

    Args:
        file_path: in a call, a text may name only files of this chat, plugin or call, because it
            may come from a model.

    Raises:
        InvalidValueError: ``from_chat_key`` is empty, or a text names another file.
        OSError: the file cannot be read.
    """

    def copy() -> Path:
        with staging.opened(file_path) as source:
            name = file_name or _md5_of(source) + (use_suffix or Path(file_path).suffix)
            target = _upload_target(from_chat_key, name)
            source.seek(0)
            UploadArea(target.parent).put(target.name, source)
            return target

    target = await asyncio.to_thread(copy)
    return str(target), target.name


def limited_text_output(text: str, limit: int = 100, placeholder: str = "...") -> str:
    """Return a text of at most ``limit`` characters; the middle of a longer one is left out."""
    if len(text) <= limit:
        return text
    keep = max(limit - len(placeholder), 0)
    head = (keep + 1) // 2
    tail = keep - head
    return text[:head] + placeholder[:limit] + (text[-tail:] if tail else "")


def calculate_text_similarity(text1: str, text2: str, min_length: int = 0) -> float:
    """Return the similarity of two texts, 0 to 1; 0 if one is shorter than ``min_length``.

    Texts of up to 1,000 characters are compared by ``difflib``, which takes cubic time. Longer ones are
    compared by the groups of three characters that they share (Dice's coefficient).
    """
    if min(len(text1), len(text2)) < min_length:
        return 0.0
    if max(len(text1), len(text2)) <= _MOST_COMPARED_CHARS:
        return difflib.SequenceMatcher(None, text1, text2).ratio()
    groups1, groups2 = (Counter(zip(text, text[1:], text[2:], strict=False)) for text in (text1, text2))
    return 2 * (groups1 & groups2).total() / (groups1.total() + groups2.total())


def calculate_file_md5(file_path: str | Path) -> str:
    """Return a file's MD5 as hexadecimal text."""
    with staging.opened(Path(file_path)) as file:
        return _md5_of(file)


def _md5_of(file: BinaryIO) -> str:
    return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()  # type: ignore[arg-type]


def _upload_target(chat_key: str, name: str) -> Path:
    if not chat_key:
        raise InvalidValueError("pass file_path, or from_chat_key to store in that chat's uploads")
    if runtime.is_bound():
        runtime.current().areas.uploads_dir(chat_key)
    return convert_filename_to_access_path(safe_basename(name), chat_key)


def _write(path: Path, data: bytes) -> None:
    place = shared_place(path)
    if place is not None:
        copy_in(*place, data)
        return
    make_directory(path.parent)
    area = area_of(path)
    if area is not None:
        relative = (path.parent.resolve() / path.name).relative_to(area.resolve())
        UploadArea(area).put(str(relative), data)
        return
    with open_private(path, "wb") as file:
        file.write(data)
