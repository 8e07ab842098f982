"""The key that pays for a round, in the row of the round."""

from __future__ import annotations

from alembic import op
from sqlalchemy import Column

from storage.sql import KeyText

revision = "0030"
down_revision = "0029"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the column; rounds that 0.2.0 requests have none, and ``key_turns`` names who pays for them."""
    op.add_column("rounds", Column("key_id", KeyText(), nullable=True))


def downgrade() -> None:
    """Remove the column."""
    op.drop_column("rounds", "key_id")
