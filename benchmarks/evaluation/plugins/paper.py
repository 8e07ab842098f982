"""Files and tables by methods: what an agent without code needs for them."""

from __future__ import annotations

import ast
import asyncio
import csv
import io
import operator
import sqlite3
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any, Final

from nekro_agent.api.plugin import NekroPlugin, SandboxMethodType
from nekro_agent.api.schemas import AgentCtx

plugin = NekroPlugin(
    name="Paper",
    module_name="paper",
    description="Read and write files, query tables, draw charts, calculate.",
    version="1.0.0",
    author="eval",
    url="",
)

_OPERATORS: Final[dict[type[ast.AST], Callable[..., Any]]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.USub: operator.neg,
}
_MOST_ROWS = 200


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "List files", "List the files of the chat.")
async def list_files(_ctx: AgentCtx) -> list[str]:
    """Return the paths of the chat's files."""
    found = []
    for area, path in (("uploads", _ctx.fs.upload_path), ("shared", _ctx.fs.shared_path)):
        found += [
            f"/app/{area}/{name.relative_to(path)}" for name in sorted(path.rglob("*")) if name.is_file()
        ]
    return found


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "Read a file", "Read a text file.")
async def read_file(
    _ctx: AgentCtx, path: str, start: int = 0, most: int = 20000, encoding: str = "utf-8"
) -> str:
    """Return the text of a file.

    Args:
        path (str): A file in `/app/uploads` or `/app/shared`.
        start (int): First character.
        most (int): How many characters.
        encoding (str): Of the file.
    """
    text = _file(_ctx, path).read_text(encoding)
    return text[start : start + most]


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "Write a file", "Write a text file.")
async def write_file(_ctx: AgentCtx, name: str, text: str) -> str:
    """Write a text file and return its path, for example for `send_msg_file`.

    Args:
        name (str): Name of the file.
        text (str): Its text.
    """
    return await _ctx.fs.mixed_forward_file(text.encode(), file_name=name)


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "Query tables", "Query CSV files by SQL.")
async def query_table(_ctx: AgentCtx, path: str, sql: str, other: str = "") -> list[dict[str, Any]]:
    """Query CSV files by SQL (SQLite) and return the rows, at most 200.

    Args:
        path (str): A CSV file, which is the table `t`.
        sql (str): A SELECT.
        other (str): A second CSV file, which is the table `u`.
    """
    files = {"t": _file(_ctx, path)} | ({"u": _file(_ctx, other)} if other else {})
    return await asyncio.to_thread(_query, files, sql)


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "Save a query", "Save the result of a query as CSV.")
async def save_query(_ctx: AgentCtx, path: str, sql: str, name: str, other: str = "") -> str:
    """Save the rows of a query as a CSV file and return its path.

    Args:
        path (str): A CSV file, which is the table `t`.
        sql (str): A SELECT (SQLite).
        name (str): Name of the new file.
        other (str): A second CSV file, which is the table `u`.
    """
    rows = await query_table(_ctx, path, sql, other)
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]) if rows else [])
    writer.writeheader()
    writer.writerows(rows)
    return await write_file(_ctx, name, text.getvalue())


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "Draw a chart", "Draw a bar chart of a query.")
async def draw_chart(_ctx: AgentCtx, path: str, sql: str, title: str) -> str:
    """Draw a bar chart of a query's rows as a PNG and return its path.

    Args:
        path (str): A CSV file, which is the table `t`.
        sql (str): A SELECT (SQLite) of two columns: label and number.
        title (str): Title of the chart.
    """
    rows = [tuple(row.values()) for row in await query_table(_ctx, path, sql)]
    png = await asyncio.to_thread(_bars, rows, title)
    return await _ctx.fs.mixed_forward_file(png, file_name=f"chart_{len(png)}.png")


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "Resize a picture", "Resize a picture.")
async def resize_picture(_ctx: AgentCtx, path: str, width: int, height: int) -> str:
    """Resize a picture and return the path of the new PNG.

    Args:
        path (str): A picture in `/app/uploads` or `/app/shared`.
        width (int): Pixels, 1 to 2000.
        height (int): Pixels, 1 to 2000.
    """
    from PIL import Image

    with Image.open(_file(_ctx, path)) as picture:
        resized = picture.resize((width, height))
    content = io.BytesIO()
    resized.save(content, "PNG")
    name = f"{PurePosixPath(path).stem}_{width}x{height}.png"
    return await _ctx.fs.mixed_forward_file(content.getvalue(), file_name=name)


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "Calculate", "Calculate an expression.")
async def calculate(_ctx: AgentCtx, expression: str) -> float:
    """Return the value of an expression of numbers, + - * / and parentheses.

    Args:
        expression (str): For example "2 * (3 + 4)".
    """
    return float(_value(ast.parse(expression, mode="eval").body))


def _file(ctx: AgentCtx, path: str) -> Path:
    found = ctx.fs.get_file(path)
    if not found.is_file():
        raise ValueError(f"there is no file {path!r}; list_files lists them")
    return found


def _query(files: dict[str, Path], sql: str) -> list[dict[str, Any]]:
    with sqlite3.connect(":memory:") as database:
        for table, path in files.items():
            head, *rows = csv.reader(path.read_text("utf-8").split("\n"))
            columns = ", ".join(f'"{name}"' for name in head)
            database.execute(f"CREATE TABLE {table} ({columns})")
            marks = ", ".join("?" * len(head))
            database.executemany(
                f"INSERT INTO {table} VALUES ({marks})",
                [[_number(cell) for cell in row] for row in rows if row],
            )
        cursor = database.execute(sql)
        names = [column[0] for column in cursor.description]
        return [dict(zip(names, row, strict=True)) for row in cursor.fetchmany(_MOST_ROWS)]


def _number(cell: str) -> float | int | str | None:
    for kind in (int, float):
        try:
            return kind(cell)
        except ValueError:
            continue
    return cell or None


def _bars(rows: list[tuple[Any, ...]], title: str) -> bytes:
    from PIL import Image, ImageDraw

    width, height, most = 480, 320, max(float(row[1]) for row in rows)
    picture = Image.new("RGB", (width, height), "white")
    draw = ImageDraw.Draw(picture)
    draw.text((10, 8), title.encode("ascii", "replace").decode(), "black")
    step = width // len(rows)
    for position, (label, number) in enumerate(rows):
        top = height - 30 - int((height - 70) * float(number) / most)
        draw.rectangle((position * step + 8, top, (position + 1) * step - 8, height - 30), "steelblue")
        draw.text((position * step + 8, height - 24), str(label).encode("ascii", "replace").decode(), "black")
    content = io.BytesIO()
    picture.save(content, "PNG")
    return content.getvalue()


def _value(node: ast.AST) -> Any:
    if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_value(node.left), _value(node.right))
    if isinstance(node, ast.UnaryOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_value(node.operand))
    raise ValueError("only numbers, + - * / and parentheses are calculated")
