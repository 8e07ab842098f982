"""Store the HTTP servers of plugins, the clients of adapters with what they are sent, and webhooks."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None

_SEQUENCE = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
_TIME = sa.DateTime(timezone=True)


def upgrade() -> None:
    op.create_table(
        "worker_sites",
        sa.Column("worker_id", sa.Text(), nullable=False),
        sa.Column("plugin_key", sa.Text(), nullable=False),
        sa.Column("address", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("worker_id", "plugin_key", name=op.f("pk_worker_sites")),
    )
    _create_adapter_tables()
    _create_webhook_tables()


def _create_adapter_tables() -> None:
    op.create_table(
        "adapter_clients",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("adapter_key", sa.Text(), nullable=False),
        sa.Column("platform", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("version", sa.Text(), nullable=False),
        sa.Column("created_at", _TIME, nullable=False),
        sa.Column("seen_at", _TIME, nullable=False),
        sa.Column("owner", sa.Text()),
        sa.Column("lease_until", _TIME),
        sa.Column("fence", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_adapter_clients")),
    )
    op.create_index(op.f("ix_adapter_clients_seen_at"), "adapter_clients", ["seen_at"])
    op.create_table(
        "adapter_subscriptions",
        sa.Column("client_id", sa.Text(), nullable=False),
        sa.Column("channel_id", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(
            ["client_id"],
            ["adapter_clients.id"],
            name=op.f("fk_adapter_subscriptions_client_id"),
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("client_id", "channel_id", name=op.f("pk_adapter_subscriptions")),
    )
    op.create_table(
        "adapter_sends",
        sa.Column("sequence", _SEQUENCE, sa.Identity(), nullable=False),
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("adapter_key", sa.Text(), nullable=False),
        sa.Column("channel_id", sa.Text(), nullable=False),
        sa.Column("event", sa.Text(), nullable=False),
        sa.Column("message_id", sa.Text()),
        sa.Column("data", sa.Text()),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("client_id", sa.Text()),
        sa.Column("client_fence", sa.BigInteger()),
        sa.Column("due_at", _TIME, nullable=False),
        sa.Column("expires_at", _TIME),
        sa.Column("answer", sa.Text()),
        sa.Column("error", sa.Text()),
        sa.Column("created_at", _TIME, nullable=False),
        sa.Column("finished_at", _TIME),
        sa.PrimaryKeyConstraint("sequence", name=op.f("pk_adapter_sends")),
        sa.UniqueConstraint("id", name=op.f("uq_adapter_sends_id")),
        sqlite_autoincrement=True,
    )
    op.create_index(op.f("ix_adapter_sends_finished_at"), "adapter_sends", ["finished_at"])
    is_open = sa.text("state IN ('waiting', 'sent')")
    op.create_index(
        "ix_adapter_sends_open",
        "adapter_sends",
        ["channel_id", "sequence"],
        postgresql_where=is_open,
        sqlite_where=is_open,
    )


def _create_webhook_tables() -> None:
    op.create_table(
        "webhooks",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("url", sa.Text(), nullable=False),
        sa.Column("description", sa.Text(), nullable=False),
        sa.Column("events", sa.Text(), nullable=False),
        sa.Column("chats", sa.Text(), nullable=False),
        sa.Column("secret_version", sa.Integer(), nullable=False),
        sa.Column("is_active", sa.Boolean(), nullable=False),
        sa.Column("fault", sa.Text()),
        sa.Column("created_at", _TIME, nullable=False),
        sa.Column("updated_at", _TIME, nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_webhooks")),
    )
    op.create_table(
        "webhook_cursors",
        sa.Column("webhook_id", sa.Text(), nullable=False),
        sa.Column("chat_key", sa.Text(), nullable=False),
        sa.Column("number", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(
            ["webhook_id"], ["webhooks.id"], name=op.f("fk_webhook_cursors_webhook_id"), ondelete="CASCADE"
        ),
        sa.ForeignKeyConstraint(
            ["chat_key"], ["chats.chat_key"], name=op.f("fk_webhook_cursors_chat_key"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("webhook_id", "chat_key", name=op.f("pk_webhook_cursors")),
    )
    op.create_table(
        "webhook_deliveries",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("webhook_id", sa.Text(), nullable=False),
        sa.Column("chat_key", sa.Text(), nullable=False),
        sa.Column("number", sa.BigInteger(), nullable=False),
        sa.Column("type", sa.Text(), nullable=False),
        sa.Column("body", sa.Text(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("attempts", sa.Integer(), nullable=False),
        sa.Column("due_at", _TIME, nullable=False),
        sa.Column("status", sa.Integer()),
        sa.Column("error", sa.Text()),
        sa.Column("created_at", _TIME, nullable=False),
        sa.Column("finished_at", _TIME),
        sa.ForeignKeyConstraint(
            ["webhook_id"],
            ["webhooks.id"],
            name=op.f("fk_webhook_deliveries_webhook_id"),
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_webhook_deliveries")),
    )
    op.create_index(op.f("ix_webhook_deliveries_finished_at"), "webhook_deliveries", ["finished_at"])
    op.create_index(
        "ix_webhook_deliveries_webhook_id_created_at", "webhook_deliveries", ["webhook_id", "created_at"]
    )
    is_open = sa.text("state = 'waiting'")
    op.create_index(
        "ix_webhook_deliveries_open",
        "webhook_deliveries",
        ["due_at"],
        postgresql_where=is_open,
        sqlite_where=is_open,
    )


def downgrade() -> None:
    for table in (
        "webhook_deliveries",
        "webhook_cursors",
        "webhooks",
        "adapter_sends",
        "adapter_subscriptions",
        "adapter_clients",
        "worker_sites",
    ):
        op.drop_table(table)
