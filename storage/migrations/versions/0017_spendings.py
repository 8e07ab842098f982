"""Keep what rounds and plugins spend, and the totals that budgets limit."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0017"
down_revision = "0016"
branch_labels = None
depends_on = None

_TIME = sa.DateTime(timezone=True)


def upgrade() -> None:
    op.create_table(
        "spendings",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("part", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("day", sa.Text(), nullable=False),
        *(
            sa.Column(name, sa.Text(), nullable=True)
            for name in ("chat_key", "user_id", "key_id", "turn_id", "plugin_key")
        ),
        sa.Column("model_group", sa.Text(), nullable=False),
        sa.Column("model", sa.Text(), nullable=False),
        sa.Column("rounds", sa.Integer(), nullable=False),
        sa.Column("requests", sa.Integer(), nullable=False),
        sa.Column("prompt_tokens", sa.BigInteger(), nullable=False),
        sa.Column("completion_tokens", sa.BigInteger(), nullable=False),
        sa.Column("cost", sa.Double(), nullable=False),
        sa.Column("sandbox_seconds", sa.Double(), nullable=False),
        sa.Column("created_at", _TIME, nullable=False),
        sa.Column("settled_at", _TIME, nullable=True),
        sa.PrimaryKeyConstraint("id", "part", name=op.f("pk_spendings")),
    )
    for column in ("created_at", "day", "turn_id"):
        op.create_index(op.f(f"ix_spendings_{column}"), "spendings", [column])
    op.create_table(
        "spending_totals",
        sa.Column("scope", sa.Text(), nullable=False),
        sa.Column("period", sa.Text(), nullable=False),
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("tokens", sa.BigInteger(), nullable=False),
        sa.Column("cost", sa.Double(), nullable=False),
        sa.Column("rounds", sa.BigInteger(), nullable=False),
        sa.Column("sandbox_seconds", sa.Double(), nullable=False),
        sa.Column("warned", sa.Text(), nullable=False),
        sa.Column("updated_at", _TIME, nullable=False),
        sa.PrimaryKeyConstraint("scope", "period", "id", name=op.f("pk_spending_totals")),
    )
    op.create_index(op.f("ix_spending_totals_updated_at"), "spending_totals", ["updated_at"])


def downgrade() -> None:
    op.drop_table("spending_totals")
    op.drop_table("spendings")
