"""Keep which turn's work caused a turn, so that their spans are in one trace."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0019"
down_revision = "0018"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("rounds", sa.Column("root_turn_id", sa.Text(), nullable=True))


def downgrade() -> None:
    op.drop_column("rounds", "root_turn_id")
