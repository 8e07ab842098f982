"""Keep which model group a chat has chosen."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0016"
down_revision = "0013"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("chats", sa.Column("model_group", sa.Text(), nullable=True))


def downgrade() -> None:
    op.drop_column("chats", "model_group")
