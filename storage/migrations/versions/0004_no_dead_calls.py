"""Drop the index of dead calls: dead letters are kept in the broker, and no row was ever in that state."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.drop_index("ix_calls_dead", table_name="calls")


def downgrade() -> None:
    op.create_index(
        "ix_calls_dead",
        "calls",
        ["finished_at"],
        postgresql_where=sa.text("state IN ('dead')"),
        sqlite_where=sa.text("state IN ('dead')"),
    )
