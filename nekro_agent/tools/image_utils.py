"""Makes images small enough for a model's request."""

from __future__ import annotations

import asyncio
import base64
import io
from typing import TYPE_CHECKING, Any, Final

from loguru import logger

from nekro_agent.errors import PackageInstallError

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["process_image_data_url"]


#: Pillow would also read formats whose decoders are rarely used, or are programs of the host (PostScript).
_FORMATS: Final = ("BMP", "GIF", "JPEG", "PNG", "WEBP")
_MOST_PIXELS: Final = 40_000_000
_QUALITIES: Final = (85, 60, 35, 15)
#: Least side in pixels.
_LEAST_SIDE: Final = 16


async def process_image_data_url(data_url: str, max_size: int = 500 * 1024) -> str:
    """Return an image as a data URL of at most ``max_size`` bytes of image.

    An image that is small enough is returned unchanged. Otherwise it is written as PNG if it has
    transparent parts and fits, else as JPEG, with lower quality and then with fewer pixels until it fits.
    What is not a BMP, GIF, JPEG, PNG or WebP image of at most 40 million pixels is returned unchanged, with
    an error in the log.

    Args:
        max_size: bytes of the image, before base64.

    Raises:
        PackageInstallError: Pillow is not installed.
    """
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError as exc:
        raise PackageInstallError("process_image_data_url needs Pillow: pip install pillow") from exc
    try:
        head, _, encoded = data_url.partition(",")
        if not head.startswith("data:") or ";base64" not in head:
            raise ValueError("it is not a base64 data URL")
        content = base64.b64decode(encoded, validate=False)
        if len(content) <= max_size:
            Image.open(io.BytesIO(content), formats=_FORMATS).verify()
            return data_url
        return await asyncio.to_thread(_shrunk, content, max_size)
    except (ValueError, OSError, UnidentifiedImageError, Image.DecompressionBombError) as exc:
        logger.bind(error=str(exc)).error("image_not_made_small")
        return data_url


def _shrunk(content: bytes, max_size: int) -> str:
    from PIL import Image

    with Image.open(io.BytesIO(content), formats=_FORMATS) as opened:
        if opened.width * opened.height > _MOST_PIXELS:
            raise ValueError(f"it has {opened.width} x {opened.height} pixels")
        opened.load()
        attempts = _attempts(opened)
        media_type, smallest = next(attempts)
        while len(smallest) > max_size and (attempt := next(attempts, None)):
            media_type, smallest = attempt
    return f"data:{media_type};base64,{base64.b64encode(smallest).decode()}"


def _attempts(image: Any) -> Iterator[tuple[str, bytes]]:
    """Yield smaller and smaller forms of an image, the last one of few pixels."""
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        yield "image/png", _written(image, format="PNG", optimize=True)
    opaque = image.convert("RGB")
    while True:
        for quality in _QUALITIES:
            yield "image/jpeg", _written(opaque, format="JPEG", quality=quality, optimize=True)
        if min(opaque.size) <= _LEAST_SIDE:
            return
        opaque = opaque.resize([max(_LEAST_SIDE, side // 2) for side in opaque.size])


def _written(image: Any, **options: Any) -> bytes:
    target = io.BytesIO()
    image.save(target, **options)
    return target.getvalue()
