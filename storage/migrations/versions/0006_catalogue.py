"""Add the catalogue: workers, and the plugins that they serve."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from storage.sql import FaithfulText, KeyText, UtcDateTime

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "workers",
        sa.Column("id", KeyText(), nullable=False),
        sa.Column("name", FaithfulText(), nullable=False),
        sa.Column("lane", FaithfulText(), nullable=False),
        sa.Column("host", FaithfulText(), nullable=False),
        sa.Column("pid", sa.Integer(), nullable=False),
        sa.Column("started_at", UtcDateTime(), nullable=False),
        sa.Column("owner", FaithfulText(), nullable=True),
        sa.Column("lease_until", UtcDateTime(), nullable=True),
        sa.Column("fence", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_workers")),
    )
    op.create_table(
        "plugin_snapshots",
        sa.Column("digest", KeyText(), nullable=False),
        sa.Column("plugin_key", FaithfulText(), nullable=False),
        sa.Column("entry", FaithfulText(), nullable=False),
        sa.Column("published_at", UtcDateTime(), nullable=False),
        sa.PrimaryKeyConstraint("digest", name=op.f("pk_plugin_snapshots")),
    )
    op.create_table(
        "worker_plugins",
        sa.Column("worker_id", KeyText(), nullable=False),
        sa.Column("position", sa.Integer(), nullable=False),
        sa.Column("digest", KeyText(), nullable=False),
        sa.PrimaryKeyConstraint("worker_id", "position", name=op.f("pk_worker_plugins")),
    )
    op.create_index(op.f("ix_worker_plugins_digest"), "worker_plugins", ["digest"])


def downgrade() -> None:
    op.drop_index(op.f("ix_worker_plugins_digest"), table_name="worker_plugins")
    op.drop_table("worker_plugins")
    op.drop_table("plugin_snapshots")
    op.drop_table("workers")
