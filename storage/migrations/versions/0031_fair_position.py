"""The order in which waiting rounds start, in the rows of the rounds."""

from __future__ import annotations

from alembic import op
from sqlalchemy import BigInteger, Column, TextClause, text

revision = "0031"
down_revision = "0030"
branch_labels = None
depends_on = None

_WAITS = "state IN ('requested')"
_INDEXES: dict[str, tuple[list[str | TextClause], str]] = {
    "ix_rounds_fair": (["fair_position", "sequence"], f"{_WAITS} AND fair_position >= 0"),
    "ix_rounds_fair_owner": (
        [text("coalesce(nullif(key_id, ''), chat_key)"), "fair_position"],
        f"{_WAITS} AND fair_position > -1",
    ),
}


def upgrade() -> None:
    """Add the column and its indexes; rounds that 0.2.0 requests start before the others."""
    op.add_column("rounds", Column("fair_position", BigInteger(), nullable=False, server_default="0"))
    for name, (columns, condition) in _INDEXES.items():
        where = text(condition)
        op.create_index(name, "rounds", columns, postgresql_where=where, sqlite_where=where)


def downgrade() -> None:
    """Remove them."""
    for name in _INDEXES:
        op.drop_index(name, "rounds")
    op.drop_column("rounds", "fair_position")
