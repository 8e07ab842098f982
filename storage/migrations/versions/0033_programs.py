"""What a program needs to be run again: readings, why it cannot be, and what it waits for."""

from __future__ import annotations

from alembic import op
from sqlalchemy import Column, ForeignKey, text

from storage.sql import FaithfulText, JsonText, KeyText, UtcDateTime

revision = "0033"
down_revision = "0032"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the columns and the table."""
    op.add_column("calls", Column("readings", FaithfulText(), nullable=True))
    op.add_column("rounds", Column("not_resumable", FaithfulText(), nullable=True))
    op.add_column("rounds", Column("readings", FaithfulText(), nullable=True))
    op.add_column("rounds", Column("program_id", KeyText(), nullable=True))
    op.create_index("ix_rounds_program_id", "rounds", ["program_id"])
    op.create_table(
        "parked_programs",
        Column("call_id", KeyText(), primary_key=True),
        Column("program_id", KeyText(), ForeignKey("rounds.id", ondelete="CASCADE"), nullable=False),
        Column("chat_key", KeyText(), ForeignKey("chats.chat_key", ondelete="CASCADE"), nullable=False),
        Column("turn_id", KeyText(), nullable=True),
        Column("kind", KeyText(), nullable=False),
        Column("subject", KeyText(), nullable=True),
        Column("about", JsonText(), nullable=True),
        Column("until", UtcDateTime(), nullable=True),
        Column("answers", JsonText(), nullable=False),
        Column("notes", JsonText(), nullable=False),
        Column("kept", JsonText(), nullable=True),
        Column("not_kept", JsonText(), nullable=True),
        Column("parked_at", UtcDateTime(), nullable=False),
    )
    op.create_index("ix_parked_programs_program_id", "parked_programs", ["program_id"])
    is_open = text("until IS NOT NULL")
    for name, column in (("ix_parked_programs_open", "chat_key"), ("ix_parked_programs_until", "until")):
        op.create_index(name, "parked_programs", [column], sqlite_where=is_open, postgresql_where=is_open)


def downgrade() -> None:
    """Remove them."""
    op.drop_table("parked_programs")
    op.drop_index("ix_rounds_program_id", "rounds")
    op.drop_column("rounds", "program_id")
    op.drop_column("rounds", "readings")
    op.drop_column("rounds", "not_resumable")
    op.drop_column("calls", "readings")
