"""Mark tokens and costs that are estimates, because an endpoint reported no possible number."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0028"
down_revision = "0027"
branch_labels = None
depends_on = None

_NONE = sa.text("0")


def upgrade() -> None:
    op.add_column(
        "spendings", sa.Column("estimated_requests", sa.Integer(), server_default=_NONE, nullable=False)
    )
    op.add_column(
        "spending_totals",
        sa.Column("estimated_requests", sa.BigInteger(), server_default=_NONE, nullable=False),
    )
    op.add_column("rounds", sa.Column("tokens_estimated", sa.Boolean(), nullable=True))
    op.add_column(
        "chat_summaries",
        sa.Column("tokens_estimated", sa.Boolean(), server_default=sa.false(), nullable=False),
    )


def downgrade() -> None:
    op.drop_column("chat_summaries", "tokens_estimated")
    op.drop_column("rounds", "tokens_estimated")
    op.drop_column("spending_totals", "estimated_requests")
    op.drop_column("spendings", "estimated_requests")
