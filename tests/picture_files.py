"""Makes picture files for tests."""

from __future__ import annotations

import io
import random
import struct
import zlib
from typing import Any

from PIL import Image

__all__ = ["bomb", "noise", "saved"]


def saved(image: Image.Image, form: str = "PNG", **options: Any) -> bytes:
    """Return a picture as a file."""
    target = io.BytesIO()
    image.save(target, format=form, **options)
    return target.getvalue()


def noise(width: int, height: int) -> Image.Image:
    """Return a picture that no format makes small."""
    return Image.frombytes("RGB", (width, height), random.Random(7).randbytes(width * height * 3))


def bomb(side: int) -> bytes:
    """A valid PNG of one bit per pixel, all zero."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", side, side, 1, 0, 0, 0, 0)
    packer = zlib.compressobj(9)
    row = bytes(side // 8 + 1)
    body = b"".join([packer.compress(row) for _ in range(side)]) + packer.flush()
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", body) + chunk(b"IEND", b"")
