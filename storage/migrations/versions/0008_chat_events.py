"""Number and keep the events of chats; record the turns of messages and jobs."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None


def upgrade() -> None:
    # An older release adds rows without these columns.
    op.add_column(
        "chats", sa.Column("last_event", sa.BigInteger(), nullable=False, server_default=sa.text("0"))
    )
    op.add_column("messages", sa.Column("turn_id", sa.Text(), nullable=True))
    op.create_index("ix_messages_turn_id", "messages", ["turn_id"])
    for name in ("call_id", "round_id", "turn_id"):
        op.add_column("jobs", sa.Column(name, sa.Text(), nullable=True))
    op.create_index("ix_jobs_turn_id", "jobs", ["turn_id"])
    op.create_table(
        "chat_events",
        sa.Column("chat_key", sa.Text(), nullable=False),
        sa.Column("number", sa.BigInteger(), nullable=False),
        sa.Column("type", sa.Text(), nullable=False),
        sa.Column("turn_id", sa.Text(), nullable=True),
        sa.Column("round_id", sa.Text(), nullable=True),
        sa.Column("call_id", sa.Text(), nullable=True),
        sa.Column("message_id", sa.Text(), nullable=True),
        sa.Column("data", sa.Text(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("chat_key", "number", name=op.f("pk_chat_events")),
    )
    op.create_index("ix_chat_events_turn_id", "chat_events", ["turn_id"])
    op.create_index("ix_chat_events_created_at", "chat_events", ["created_at"])


def downgrade() -> None:
    op.drop_table("chat_events")
    # Not in a batch; see 0002.
    op.drop_index("ix_jobs_turn_id", "jobs")
    for name in ("turn_id", "round_id", "call_id"):
        op.drop_column("jobs", name)
    op.drop_index("ix_messages_turn_id", "messages")
    op.drop_column("messages", "turn_id")
    op.drop_column("chats", "last_event")
