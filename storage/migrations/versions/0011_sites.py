"""Store where workers serve the HTTP routes of plugins."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0007"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "worker_sites",
        sa.Column("worker_id", sa.Text(), nullable=False),
        sa.Column("plugin_key", sa.Text(), nullable=False),
        sa.Column("address", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("worker_id", "plugin_key", name=op.f("pk_worker_sites")),
    )


def downgrade() -> None:
    op.drop_table("worker_sites")
