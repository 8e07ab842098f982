"""Rows as one parameter of a statement: a JSON array of arrays, which both databases take apart.

A parameter per value would take several times as long, and a driver limits their number.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

from sqlalchemy import Executable, TextClause, text

from storage.driver.statements import FixedStatement
from storage.driver.values import escaped

__all__ = ["MOST_ROWS", "chunks", "fixed", "given", "rows_of"]

#: Most rows of a statement.
MOST_ROWS: Final = 5000

#: SQLite's planner would read a whole table instead of looking up each row; PostgreSQL's does not.
_JOIN: Final = {"sqlite": "CROSS JOIN", "postgresql": "JOIN"}
_NOW: Final = {
    "sqlite": "(strftime('%Y-%m-%d %H:%M:%f', 'now') || '000')",
    "postgresql": "statement_timestamp()",
}
_BEFORE: Final = {
    "sqlite": "(strftime('%Y-%m-%d %H:%M:%f', 'now', -:seconds || ' seconds') || '000')",
    "postgresql": "statement_timestamp() - make_interval(secs => CAST(:seconds AS double precision))",
}


def given(dialect: str, **columns: str) -> str:
    """Return SQL for the parameter ``rows`` as a table ``given`` with these columns, by their types."""
    if dialect == "sqlite":
        values = [f"json_extract(value, '$[{at}]') AS {name}" for at, name in enumerate(columns)]
        return f"(SELECT {', '.join(values)} FROM json_each(:rows)) AS given"  # noqa: S608
    values = [f"CAST(value ->> {at} AS {kind}) AS {name}" for at, (name, kind) in enumerate(columns.items())]
    source = "json_array_elements(CAST(:rows AS json)) AS of_json (value)"
    return f"(SELECT {', '.join(values)} FROM {source}) AS given"  # noqa: S608


def fixed(statement: str, /, *, returns: dict[str, Any] | None = None, **columns: str) -> FixedStatement:
    """Return a statement whose text has ``{given}``, ``{join}``, ``{now}`` and ``{before}``.

    ``{before}`` is the time of the parameter ``seconds`` ago.

    Args:
        returns: types of the columns that it returns.
        columns: those of ``given``.
    """

    def build(dialect: str) -> Executable:
        sql = statement.format(
            given=given(dialect, **columns), join=_JOIN[dialect], now=_NOW[dialect], before=_BEFORE[dialect]
        )
        clause: TextClause = text(sql)
        return clause if returns is None else clause.columns(**returns)

    return FixedStatement(build)


def rows_of(rows: Iterable[Sequence[Any]]) -> str:
    """Return the parameter ``rows``."""
    plain = [[escaped(value) if isinstance(value, str) else value for value in row] for row in rows]
    return json.dumps(plain, ensure_ascii=False, separators=(",", ":"))


def chunks(rows: Sequence[Any]) -> Iterator[Sequence[Any]]:
    """Yield the rows, at most ``MOST_ROWS`` at a time."""
    for start in range(0, len(rows), MOST_ROWS):
        yield rows[start : start + MOST_ROWS]
