"""The calls of a round's code, TOOL calls included, in the round's row."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("rounds", sa.Column("calls", sa.Text(), nullable=True))


def downgrade() -> None:
    # Without a batch: SQLite can drop a column by itself, and a copied table would lose its partial indexes.
    op.drop_column("rounds", "calls")
