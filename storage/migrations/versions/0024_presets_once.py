"""Let a call that is repeated store its preset once."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0024"
down_revision = "0023"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("presets", sa.Column("once_key", sa.Text(), nullable=True))
    op.create_index("uq_presets_once_key", "presets", ["once_key"], unique=True)


def downgrade() -> None:
    op.drop_index("uq_presets_once_key", table_name="presets")
    op.drop_column("presets", "once_key")
