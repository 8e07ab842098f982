"""Decodes one picture and writes it smaller; run as ``python -I program.py``.

Standard input: a line of JSON (``filter_bytes``, ``side``, ``bytes``, ``pixels``, ``memory_bytes``,
``cpu_seconds``), the seccomp filter, the picture. Standard output: a line of JSON, then the new picture if
there is one. The line has ``error``, or ``width`` and ``height`` of the new picture, ``was`` (those of the
old one as it is seen) and ``animated``.

The process limits its memory and CPU time and loads the filter before it reads the picture's first byte, so a
fault of a decoder reaches neither files nor network.
"""

from __future__ import annotations

import ctypes
import io
import json
import resource
import signal
import struct
import sys
import warnings
from collections.abc import Iterator
from typing import Any

from PIL import Image, ImageOps

_FORMATS = ("GIF", "JPEG", "PNG", "WEBP")
_QUALITIES = (85, 70, 50)
#: Longest side in pixels below which a picture is not made smaller.
_SMALLEST_SIDE = 16
PR_SET_PDEATHSIG = 1
PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS, SECCOMP_MODE_FILTER = 22, 38, 2


class PictureRefusedError(Exception):
    """The picture cannot be shown; the message says why."""


def confine(given: dict[str, int], program: bytes) -> None:
    """Limit this process; what it needs must be imported."""
    for name, value in (
        (resource.RLIMIT_AS, given["memory_bytes"]),
        (resource.RLIMIT_CPU, given["cpu_seconds"]),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, 0),
    ):
        resource.setrlimit(name, (value, value))
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    buffer = ctypes.create_string_buffer(program, len(program))
    loaded = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(buffer))
    if libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or libc.prctl(
        PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.create_string_buffer(loaded, len(loaded))
    ):
        raise OSError(ctypes.get_errno(), "seccomp")


def warm_up() -> None:
    """Make Pillow import what it imports at the first use: the filter forbids that later."""
    for name in _FORMATS:
        first, second = Image.new("P", (2, 2), 0), Image.new("P", (2, 2), 1)
        several = {"save_all": True, "append_images": [second]} if name == "GIF" else {}
        content = written(first if name == "GIF" else first.convert("RGB"), format=name, **several)
        shrink(content, side=1, most_bytes=1 << 20, pixels=4)


def shrink(data: bytes, *, side: int, most_bytes: int, pixels: int) -> tuple[dict[str, Any], bytes]:
    """Return the facts and the bytes of a picture without metadata, at most ``side`` pixels long.

    Raises:
        RefusedError: it has too many pixels, or cannot be made small enough.
    """
    with Image.open(io.BytesIO(data), formats=_FORMATS) as opened:
        width, height = opened.size
        if width * height > pixels:
            raise PictureRefusedError(f"it has {width} x {height} pixels, more than {pixels}")
        animated = bool(getattr(opened, "is_animated", False))
        is_sharp = opened.format in ("PNG", "GIF")
        turned = opened.getexif().get(274, 1) in (5, 6, 7, 8)
        image = upright(opened, side)
    facts = {"was": [height, width] if turned else [width, height], "animated": animated}
    for form, content in forms(image, is_sharp=is_sharp):
        if len(content) <= most_bytes:
            return facts | {"width": form.width, "height": form.height}, content
    raise PictureRefusedError(f"it does not fit into {most_bytes} bytes")


def upright(opened: Any, side: int) -> Image.Image:
    """Return the first frame, scaled, turned as its EXIF data says, as RGB or RGBA."""
    opened.draft("RGB", (side, side))
    opened.load()
    image: Any = opened
    if image.mode in ("I;16", "I;16B", "I;16L", "I", "F"):
        image = image.convert("I").point(lambda level: level / 256).convert("L")
    has_alpha = image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info
    if image.mode not in ("RGB", "RGBA", "L", "CMYK", "YCbCr"):
        image = image.convert("RGBA" if has_alpha else "RGB")
    elif has_alpha:
        image = image.convert("RGBA")
    orientation = opened.getexif().get(274)
    image.thumbnail((side, side))
    if image.mode not in ("RGB", "RGBA"):
        image = image.convert("RGB")
    plain = Image.new(image.mode, image.size)
    plain.paste(image)
    if orientation in range(2, 9):
        plain.getexif()[274] = orientation
        plain = ImageOps.exif_transpose(plain)
    return plain


def forms(image: Image.Image, *, is_sharp: bool) -> Iterator[tuple[Image.Image, bytes]]:
    """Yield a picture in smaller and smaller forms; charts and screenshots as PNG first."""
    if is_sharp or image.mode == "RGBA":
        yield image, written(image, format="PNG", compress_level=6)
    if image.mode == "RGBA":
        white = Image.new("RGB", image.size, "white")
        white.paste(image, mask=image.getchannel("A"))
        image = white
    while True:
        for quality in _QUALITIES:
            yield image, written(image, format="JPEG", quality=quality)
        width, height = (max(1, side * 3 // 4) for side in image.size)
        if max(width, height) < _SMALLEST_SIDE:
            return
        image = image.resize((width, height))


def written(image: Image.Image, **options: Any) -> bytes:
    """Return a picture as a file."""
    target = io.BytesIO()
    image.save(target, **options)
    return target.getvalue()


def main() -> None:
    """Do what the input asks for."""
    source, target = sys.stdin.buffer, sys.stdout.buffer
    given = json.loads(source.readline())
    program = source.read(given["filter_bytes"])
    # The limit of this program comes first, with a message of its own.
    Image.MAX_IMAGE_PIXELS = None
    warnings.simplefilter("ignore")
    warm_up()
    confine(given, program)
    content = b""
    try:
        facts, content = shrink(
            source.read(), side=given["side"], most_bytes=given["bytes"], pixels=given["pixels"]
        )
    except PictureRefusedError as exc:
        facts = {"error": str(exc)}
    except MemoryError:
        facts = {"error": "decoding it needs too much memory"}
    except Exception as exc:  # each decoder has errors of its own for broken files
        facts = {"error": f"it is damaged ({type(exc).__name__})"}
    target.write(json.dumps(facts).encode() + b"\n" + content)
    target.flush()


if __name__ == "__main__":
    main()
