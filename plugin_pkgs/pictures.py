"""Draw pictures that the LLM sees in its next round, or save them as files."""

from __future__ import annotations

import base64
import colorsys
import hashlib
import struct
import zlib
from typing import Any

from nekro_agent.api.plugin import NekroPlugin, SandboxMethodType
from nekro_agent.api.schemas import AgentCtx

plugin = NekroPlugin(
    name="Pictures",
    module_name="pictures",
    description="Draw a pattern for a topic and show it to the LLM.",
    version="1.0.0",
    author="nekro",
    url="",
)

_MAX_SIZE = 512
_CELLS = 8


@plugin.mount_sandbox_method(
    SandboxMethodType.MULTIMODAL_AGENT, "Draw a picture", "Draw a picture and look at it in the next round."
)
async def draw_picture(_ctx: AgentCtx, topic: str, size: int = 128) -> list[dict[str, Any]]:
    """Draw a mirrored colour pattern for a topic and look at it in the next round.

    Args:
        topic (str): What the picture stands for; the same topic gives the same picture.
        size (int): Width and height in pixels, 8 to 512.

    Returns:
        list: A text part and an image part.

    Example:
        draw_picture("autumn")
    """
    url = "data:image/png;base64," + base64.b64encode(_render(topic, _checked_size(size))).decode()
    return [
        {"type": "text", "text": f"The picture for {topic!r}:"},
        {
            "type": "image_url",
            "image_url": {"url": url},
        },
    ]


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "Save a picture", "Draw a picture into a file.")
async def save_picture(_ctx: AgentCtx, topic: str, size: int = 128) -> str:
    """Draw the picture for a topic into a file.

    Args:
        topic (str): What the picture stands for.
        size (int): Width and height in pixels, 8 to 512.

    Returns:
        str: Path of a PNG file, for example for `send_msg_file`.
    """
    png = _render(topic, _checked_size(size))
    name = hashlib.sha256(topic.encode()).hexdigest()[:12]
    return await _ctx.fs.mixed_forward_file(png, file_name=f"picture_{name}.png")


def _checked_size(size: int) -> int:
    if not _CELLS <= size <= _MAX_SIZE:
        raise ValueError(f"size {size} is not between {_CELLS} and {_MAX_SIZE}")
    return size


def _render(topic: str, size: int) -> bytes:
    """Return a PNG of 8 by 8 cells, mirrored left to right, coloured by the topic's digest."""
    digest = hashlib.sha256(topic.encode()).digest()
    hue = digest[0] / 255
    colours = [_rgb(hue, 0.15, 0.97), _rgb(hue, 0.55, 0.8), _rgb((hue + 0.45) % 1, 0.6, 0.65)]
    half = _CELLS // 2
    rows = bytearray()
    for y in range(size):
        rows.append(0)  # filter type of the line: none
        cell_y = y * _CELLS // size
        for x in range(size):
            cell_x = x * _CELLS // size
            mirrored = min(cell_x, _CELLS - 1 - cell_x)
            rows += colours[digest[cell_y * half % 32 + mirrored % half - 1] % 3]
    return _png(size, bytes(rows))


def _rgb(hue: float, saturation: float, value: float) -> bytes:
    return bytes(round(channel * 255) for channel in colorsys.hsv_to_rgb(hue, saturation, value))


def _png(size: int, rows: bytes) -> bytes:
    """Wrap 8-bit RGB rows as a PNG (W3C PNG specification, sections 5 and 11)."""
    header = struct.pack(">IIBBBBB", size, size, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(rows, 9)), (b"IEND", b""))
    body = b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in chunks
    )
    return b"\x89PNG\r\n\x1a\n" + body
