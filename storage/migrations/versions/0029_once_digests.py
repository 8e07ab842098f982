"""Digests of what repetitions of a posted message must repeat."""

from __future__ import annotations

from alembic import op
from sqlalchemy import Column, LargeBinary

revision = "0029"
down_revision = "0028"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the column; messages of 0.2.0 have none, and their repetitions are not compared."""
    op.add_column("messages", Column("once_digest", LargeBinary(), nullable=True))


def downgrade() -> None:
    """Remove the column."""
    op.drop_column("messages", "once_digest")
