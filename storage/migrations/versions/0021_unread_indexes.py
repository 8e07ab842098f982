"""Drop indexes that no query reads, so that writes keep fewer indexes."""

from __future__ import annotations

from alembic import op

revision = "0021"
down_revision = "0020"
branch_labels = None
depends_on = None

_UNREAD = (
    ("ix_messages_call_id", "messages", "call_id"),
    ("ix_calls_chat_key", "calls", "chat_key"),
    ("ix_spendings_turn_id", "spendings", "turn_id"),
)


def upgrade() -> None:
    for name, table, _ in _UNREAD:
        op.drop_index(name, table_name=table)


def downgrade() -> None:
    for name, table, column in _UNREAD:
        op.create_index(name, table, [column])
