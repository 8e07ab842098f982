"""Alembic's environment: migrates on the connection that ``storage.migrate`` passes."""

from __future__ import annotations

from typing import Any, Literal

from alembic import context
from alembic.autogenerate.api import AutogenContext
from sqlalchemy.types import TypeDecorator

from storage.tables import metadata


def _render_item(kind: str, item: Any, autogen: AutogenContext) -> str | Literal[False]:
    """Write plain column types into new migrations, so that changes to our types do not affect old ones."""
    if kind == "type" and isinstance(item, TypeDecorator):
        return f"sa.{item.impl!r}"
    return False


def run_migrations() -> None:
    """Run the requested migrations inside the connection's transaction."""
    context.configure(
        connection=context.config.attributes["connection"],
        target_metadata=metadata,
        render_item=_render_item,
        compare_type=True,
        # SQLite alters tables by copying them.
        render_as_batch=True,
    )
    with context.begin_transaction():
        context.run_migrations()


run_migrations()
