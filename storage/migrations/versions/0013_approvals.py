"""Keep the requests for approval of calls."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"
branch_labels = None
depends_on = None

_TIME = sa.DateTime(timezone=True)


def upgrade() -> None:
    op.create_table(
        "approvals",
        sa.Column(
            "sequence", sa.BigInteger().with_variant(sa.Integer, "sqlite"), sa.Identity(), nullable=False
        ),
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("call_id", sa.Text(), nullable=False),
        sa.Column("chat_key", sa.Text(), nullable=False),
        sa.Column("turn_id", sa.Text()),
        sa.Column("round_id", sa.Text()),
        sa.Column("root_turn_id", sa.Text()),
        sa.Column("user_id", sa.Text()),
        sa.Column("method", sa.Text(), nullable=False),
        sa.Column("lane", sa.Text(), nullable=False),
        sa.Column("arguments", sa.Text(), nullable=False),
        sa.Column("edited_arguments", sa.Text()),
        sa.Column("digest", sa.Text(), nullable=False),
        sa.Column("requested_at", _TIME, nullable=False),
        sa.Column("expires_at", _TIME, nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("scope", sa.Text()),
        sa.Column("grant_until", _TIME),
        sa.Column("revoked_at", _TIME),
        sa.Column("decided_by", sa.Text()),
        sa.Column("decided_at", _TIME),
        sa.Column("reason", sa.Text()),
        sa.Column("seal", sa.Text()),
        sa.ForeignKeyConstraint(
            ["chat_key"], ["chats.chat_key"], name=op.f("fk_approvals_chat_key_chats"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("sequence", name=op.f("pk_approvals")),
        sa.UniqueConstraint("id", name=op.f("uq_approvals_id")),
        sa.UniqueConstraint("call_id", name=op.f("uq_approvals_call_id")),
        sqlite_autoincrement=True,
    )
    for column in ("decided_at", "root_turn_id"):
        op.create_index(op.f(f"ix_approvals_{column}"), "approvals", [column])
    op.create_index("ix_approvals_chat_key_sequence", "approvals", ["chat_key", "sequence"])
    _create_partial_index("pending", ["expires_at"], "state = 'pending'")
    granted = "state = 'approved' AND scope IN ('turn', 'chat')"
    _create_partial_index("granted", ["chat_key", "method"], granted)


def downgrade() -> None:
    op.drop_table("approvals")


def _create_partial_index(name: str, columns: list[str], where: str) -> None:
    op.create_index(
        f"ix_approvals_{name}",
        "approvals",
        columns,
        postgresql_where=sa.text(where),
        sqlite_where=sa.text(where),
    )
