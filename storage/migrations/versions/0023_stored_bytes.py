"""Keep how many bytes each key of the HTTP API has stored, and of what they consist."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0023"
down_revision = "0022"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column(
        "api_keys", sa.Column("stored_bytes", sa.BigInteger(), server_default=sa.text("0"), nullable=False)
    )
    op.add_column("api_keys", sa.Column("stored_bytes_limit", sa.BigInteger(), nullable=True))
    op.create_table(
        "key_storage",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("key_id", sa.Text(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("bytes", sa.BigInteger(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_key_storage")),
    )
    op.create_index(op.f("ix_key_storage_kind"), "key_storage", ["kind", "created_at"])


def downgrade() -> None:
    op.drop_table("key_storage")
    op.drop_column("api_keys", "stored_bytes_limit")
    op.drop_column("api_keys", "stored_bytes")
