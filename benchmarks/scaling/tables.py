"""Tables and times of the page."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

__all__ = ["as_ms", "as_table"]


def as_table(title: str, head: Sequence[str], rows: Iterable[Sequence[object]]) -> Iterator[str]:
    """Yield the lines of a table."""
    yield f"\n{title}\n"
    yield f"| {' | '.join(head)} |"
    yield f"|{'---|' * len(head)}"
    for row in rows:
        yield f"| {' | '.join(map(str, row))} |"


def as_ms(seconds: float) -> str:
    """Return a time as text."""
    return f"{1000 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.2f} s"
