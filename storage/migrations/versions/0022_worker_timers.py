"""Keep which timers with callbacks exist in the memory of each worker, to list them with their owner."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0022"
down_revision = "0021"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "worker_timers",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("worker_id", sa.Text(), nullable=False),
        sa.Column("plugin_key", sa.Text(), nullable=False),
        sa.Column("chat_key", sa.Text(), nullable=False),
        sa.Column("fire_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("description", sa.Text(), nullable=False),
        sa.Column("temporary", sa.Boolean(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_worker_timers")),
    )
    op.create_index(op.f("ix_worker_timers_worker_id"), "worker_timers", ["worker_id"])


def downgrade() -> None:
    op.drop_table("worker_timers")
