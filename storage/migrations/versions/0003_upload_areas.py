"""Map chats to their upload directories."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "upload_areas",
        sa.Column("chat_name", sa.Text(), nullable=False),
        sa.Column("directory", sa.Text(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("chat_name", name=op.f("pk_upload_areas")),
        sa.UniqueConstraint("directory", name=op.f("uq_upload_areas_directory")),
    )


def downgrade() -> None:
    op.drop_table("upload_areas")
