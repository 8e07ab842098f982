"""Keep when something last happened in a chat, to list chats by it, and the release of each worker."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0020"
down_revision = "0019"
branch_labels = None
depends_on = None


def upgrade() -> None:
    # An older release adds and updates rows without it.
    op.add_column("chats", sa.Column("active_at", sa.DateTime(timezone=True), nullable=True))
    op.add_column("workers", sa.Column("release", sa.Text(), nullable=True))
    op.execute(
        "UPDATE chats SET active_at = (SELECT created_at FROM chat_events"
        " WHERE chat_events.chat_key = chats.chat_key AND chat_events.number = chats.last_event)"
    )


def downgrade() -> None:
    op.drop_column("workers", "release")
    op.drop_column("chats", "active_at")
