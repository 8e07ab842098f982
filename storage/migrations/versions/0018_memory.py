"""Keep summaries of older messages, and the variables of open turns."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0018"
down_revision = "0017"
branch_labels = None
depends_on = None

_TIME = sa.DateTime(timezone=True)


def upgrade() -> None:
    op.create_table(
        "chat_summaries",
        sa.Column("chat_key", sa.Text(), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False, autoincrement=False),
        sa.Column("up_to", sa.BigInteger(), nullable=False),
        sa.Column("oldest_at", _TIME, nullable=False),
        sa.Column("newest_at", _TIME, nullable=False),
        sa.Column("text", sa.Text(), nullable=False),
        sa.Column("group_name", sa.Text(), nullable=False),
        sa.Column("model", sa.Text(), nullable=False),
        sa.Column("prompt_tokens", sa.Integer()),
        sa.Column("answer_tokens", sa.Integer()),
        sa.Column("cost", sa.Double(), nullable=False),
        sa.Column("created_at", _TIME, nullable=False),
        sa.ForeignKeyConstraint(
            ["chat_key"],
            ["chats.chat_key"],
            name=op.f("fk_chat_summaries_chat_key_chats"),
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("chat_key", "version", name=op.f("pk_chat_summaries")),
    )
    op.create_index(op.f("ix_chat_summaries_oldest_at"), "chat_summaries", ["oldest_at"])
    op.create_table(
        "turn_variables",
        sa.Column("turn_id", sa.Text(), nullable=False),
        sa.Column("chat_key", sa.Text(), nullable=False),
        sa.Column("round_id", sa.Text(), nullable=False),
        sa.Column("kept", sa.Text(), nullable=False),
        sa.Column("not_kept", sa.Text(), nullable=False),
        sa.Column("updated_at", _TIME, nullable=False),
        sa.ForeignKeyConstraint(
            ["chat_key"],
            ["chats.chat_key"],
            name=op.f("fk_turn_variables_chat_key_chats"),
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("turn_id", name=op.f("pk_turn_variables")),
    )
    op.create_index("ix_turn_variables_chat_key", "turn_variables", ["chat_key"])
    op.create_index(op.f("ix_turn_variables_updated_at"), "turn_variables", ["updated_at"])


def downgrade() -> None:
    op.drop_table("turn_variables")
    op.drop_table("chat_summaries")
