"""Store the calls of a round's code, including TOOL calls, in the round's row."""

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
    # Not in a batch: SQLite can drop a column directly, and copying the table would lose its partial indexes.
    op.drop_column("rounds", "calls")
