"""The first tables."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

_TABLES = (
    "plugin_values",
    "chats",
    "messages",
    "rounds",
    "calls",
    "timers",
    "cron_jobs",
    "jobs",
    "job_signals",
    "method_marks",
    "leases",
    "downloads",
)


def upgrade() -> None:
    _create_plugin_values()
    _create_chats()
    _create_messages()
    _create_rounds()
    _create_calls()
    _create_timers()
    _create_cron_jobs()
    _create_jobs()
    _create_job_signals()
    _create_method_marks()
    _create_leases()
    _create_downloads()


def downgrade() -> None:
    for table in reversed(_TABLES):
        op.drop_table(table)


def _create_plugin_values() -> None:
    op.create_table(
        "plugin_values",
        sa.Column("digest", sa.LargeBinary(), nullable=False),
        sa.Column("plugin_key", sa.Text(), nullable=False),
        sa.Column("chat_key", sa.Text(), nullable=False),
        sa.Column("user_key", sa.Text(), nullable=False),
        sa.Column("store_key", sa.Text(), nullable=False),
        sa.Column("value", sa.Text(), nullable=False),
        sa.Column("revision", sa.BigInteger(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("updated_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("digest", name=op.f("pk_plugin_values")),
    )
    with op.batch_alter_table("plugin_values", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_plugin_values_plugin_key"), ["plugin_key"], unique=False)


def _create_chats() -> None:
    op.create_table(
        "chats",
        sa.Column("chat_key", sa.Text(), nullable=False),
        sa.Column("container_key", sa.Text(), nullable=False),
        sa.Column("adapter_key", sa.Text(), nullable=True),
        sa.Column("channel_id", sa.Text(), nullable=True),
        sa.Column("channel_name", sa.Text(), nullable=True),
        sa.Column("channel_type", sa.Text(), nullable=True),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("history_after", sa.BigInteger(), nullable=False),
        sa.Column("owner", sa.Text(), nullable=True),
        sa.Column("lease_until", sa.DateTime(timezone=True), nullable=True),
        sa.Column("fence", sa.BigInteger(), nullable=False),
        sa.Column("shared_used_at", sa.DateTime(timezone=True), nullable=True),
        sa.PrimaryKeyConstraint("chat_key", name=op.f("pk_chats")),
        sa.UniqueConstraint("container_key", name=op.f("uq_chats_container_key")),
    )
    with op.batch_alter_table("chats", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_chats_shared_used_at"), ["shared_used_at"], unique=False)


def _create_messages() -> None:
    op.create_table(
        "messages",
        sa.Column(
            "sequence",
            sa.BigInteger().with_variant(sa.Integer(), "sqlite"),
            sa.Identity(always=False),
            nullable=False,
        ),
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("chat_key", sa.Text(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("sender_id", sa.Text(), nullable=True),
        sa.Column("sender_name", sa.Text(), nullable=True),
        sa.Column("text", sa.Text(), nullable=False),
        sa.Column("data", sa.Text(), nullable=True),
        sa.Column("call_id", sa.Text(), nullable=True),
        sa.Column("round_id", sa.Text(), nullable=True),
        sa.Column("plugin_key", sa.Text(), nullable=True),
        sa.Column("once_key", sa.Text(), nullable=True),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(
            ["chat_key"], ["chats.chat_key"], name=op.f("fk_messages_chat_key"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("sequence", name=op.f("pk_messages")),
        sa.UniqueConstraint("id", name=op.f("uq_messages_id")),
        sa.UniqueConstraint("once_key", name=op.f("uq_messages_once_key")),
        sqlite_autoincrement=True,
    )
    with op.batch_alter_table("messages", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_messages_call_id"), ["call_id"], unique=False)
        batch_op.create_index("ix_messages_chat_key_sequence", ["chat_key", "sequence"], unique=False)
        batch_op.create_index(batch_op.f("ix_messages_created_at"), ["created_at"], unique=False)


def _create_rounds() -> None:
    op.create_table(
        "rounds",
        sa.Column(
            "sequence",
            sa.BigInteger().with_variant(sa.Integer(), "sqlite"),
            sa.Identity(always=False),
            nullable=False,
        ),
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("chat_key", sa.Text(), nullable=False),
        sa.Column("turn_id", sa.Text(), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("trigger_kind", sa.Text(), nullable=False),
        sa.Column("trigger_id", sa.Text(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("fence", sa.BigInteger(), nullable=False),
        sa.Column("worker", sa.Text(), nullable=True),
        sa.Column("merged_into", sa.Text(), nullable=True),
        sa.Column("requested_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("not_before", sa.DateTime(timezone=True), nullable=False),
        sa.Column("started_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("finished_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("cancel_requested_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("user_id", sa.Text(), nullable=True),
        sa.Column("observation", sa.Text(), nullable=True),
        sa.Column("segments", sa.Text(), nullable=True),
        sa.Column("prompt_chars", sa.Integer(), nullable=True),
        sa.Column("model", sa.Text(), nullable=True),
        sa.Column("answer", sa.Text(), nullable=True),
        sa.Column("answered_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("code", sa.Text(), nullable=True),
        sa.Column("stop_type", sa.Integer(), nullable=True),
        sa.Column("exit_code", sa.Integer(), nullable=True),
        sa.Column("output", sa.Text(), nullable=True),
        sa.Column("prompt_tokens", sa.Integer(), nullable=True),
        sa.Column("completion_tokens", sa.Integer(), nullable=True),
        sa.Column("cost", sa.Double(), nullable=True),
        sa.Column("error", sa.Text(), nullable=True),
        sa.ForeignKeyConstraint(
            ["chat_key"], ["chats.chat_key"], name=op.f("fk_rounds_chat_key"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("sequence", name=op.f("pk_rounds")),
        sa.UniqueConstraint("id", name=op.f("uq_rounds_id")),
        sqlite_autoincrement=True,
    )
    with op.batch_alter_table("rounds", schema=None) as batch_op:
        batch_op.create_index("ix_rounds_chat_key_sequence", ["chat_key", "sequence"], unique=False)
        batch_op.create_index(batch_op.f("ix_rounds_finished_at"), ["finished_at"], unique=False)
        batch_op.create_index(batch_op.f("ix_rounds_merged_into"), ["merged_into"], unique=False)
        batch_op.create_index(
            "ix_rounds_open",
            ["chat_key", "not_before"],
            unique=False,
            postgresql_where=sa.text("state IN ('requested', 'running')"),
            sqlite_where=sa.text("state IN ('requested', 'running')"),
        )
        batch_op.create_index(batch_op.f("ix_rounds_turn_id"), ["turn_id"], unique=False)
        batch_op.create_index(
            "uq_rounds_running",
            ["chat_key"],
            unique=True,
            postgresql_where=sa.text("state = 'running'"),
            sqlite_where=sa.text("state = 'running'"),
        )
        batch_op.create_index(
            "uq_rounds_trigger_kind_trigger_id", ["trigger_kind", "trigger_id"], unique=True
        )


def _create_calls() -> None:
    op.create_table(
        "calls",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("method", sa.Text(), nullable=False),
        sa.Column("type", sa.Text(), nullable=False),
        sa.Column("chat_key", sa.Text(), nullable=False),
        sa.Column("round_id", sa.Text(), nullable=True),
        sa.Column("lane", sa.Text(), nullable=True),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("repeatable", sa.Boolean(), nullable=False),
        sa.Column("fence", sa.BigInteger(), nullable=False),
        sa.Column("worker", sa.Text(), nullable=True),
        sa.Column("lease_until", sa.DateTime(timezone=True), nullable=True),
        sa.Column("requested_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("published_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("deadline", sa.DateTime(timezone=True), nullable=True),
        sa.Column("detached_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("started_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("finished_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("invocation", sa.Text(), nullable=True),
        sa.Column("outcome", sa.Text(), nullable=True),
        sa.Column("error_type", sa.Text(), nullable=True),
        sa.Column("error_message", sa.Text(), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_calls")),
    )
    with op.batch_alter_table("calls", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_calls_chat_key"), ["chat_key"], unique=False)
        batch_op.create_index(
            "ix_calls_dead",
            ["finished_at"],
            unique=False,
            postgresql_where=sa.text("state IN ('dead')"),
            sqlite_where=sa.text("state IN ('dead')"),
        )
        batch_op.create_index("ix_calls_finished_at", ["finished_at"], unique=False)
        batch_op.create_index(
            "ix_calls_open",
            ["requested_at"],
            unique=False,
            postgresql_where=sa.text("state IN ('queued', 'running')"),
            sqlite_where=sa.text("state IN ('queued', 'running')"),
        )
        batch_op.create_index(batch_op.f("ix_calls_round_id"), ["round_id"], unique=False)


def _create_timers() -> None:
    op.create_table(
        "timers",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("chat_key", sa.Text(), nullable=False),
        sa.Column("fire_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("description", sa.Text(), nullable=False),
        sa.Column("temporary", sa.Boolean(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(
            ["chat_key"], ["chats.chat_key"], name=op.f("fk_timers_chat_key"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_timers")),
    )
    with op.batch_alter_table("timers", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_timers_chat_key"), ["chat_key"], unique=False)
        batch_op.create_index("ix_timers_state_fire_at", ["state", "fire_at"], unique=False)


def _create_cron_jobs() -> None:
    op.create_table(
        "cron_jobs",
        sa.Column("job_id", sa.Text(), nullable=False),
        sa.Column("chat_key", sa.Text(), nullable=False),
        sa.Column("cron_expr", sa.Text(), nullable=False),
        sa.Column("timezone", sa.Text(), nullable=False),
        sa.Column("workday_mode", sa.Text(), nullable=False),
        sa.Column("title", sa.Text(), nullable=True),
        sa.Column("event_desc", sa.Text(), nullable=False),
        sa.Column("next_fire_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("last_fired_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("updated_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(
            ["chat_key"], ["chats.chat_key"], name=op.f("fk_cron_jobs_chat_key"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("job_id", name=op.f("pk_cron_jobs")),
    )
    with op.batch_alter_table("cron_jobs", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_cron_jobs_chat_key"), ["chat_key"], unique=False)
        batch_op.create_index(batch_op.f("ix_cron_jobs_next_fire_at"), ["next_fire_at"], unique=False)


def _create_jobs() -> None:
    op.create_table(
        "jobs",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("type", sa.Text(), nullable=False),
        sa.Column("task_id", sa.Text(), nullable=False),
        sa.Column("plugin_key", sa.Text(), nullable=False),
        sa.Column("chat_key", sa.Text(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("on_crash", sa.Text(), nullable=False),
        sa.Column("percent", sa.Integer(), nullable=False),
        sa.Column("message", sa.Text(), nullable=False),
        sa.Column("data", sa.Text(), nullable=True),
        sa.Column("args", sa.Text(), nullable=True),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("fence", sa.BigInteger(), nullable=False),
        sa.Column("worker", sa.Text(), nullable=True),
        sa.Column("lease_until", sa.DateTime(timezone=True), nullable=True),
        sa.Column("cancel_requested_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("published_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("started_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("updated_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("finished_at", sa.DateTime(timezone=True), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_jobs")),
    )
    with op.batch_alter_table("jobs", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_jobs_chat_key"), ["chat_key"], unique=False)
        batch_op.create_index(batch_op.f("ix_jobs_updated_at"), ["updated_at"], unique=False)
        batch_op.create_index(
            "uq_jobs_open",
            ["plugin_key", "type", "task_id"],
            unique=True,
            postgresql_where=sa.text("state IN ('queued', 'running')"),
            sqlite_where=sa.text("state IN ('queued', 'running')"),
        )


def _create_job_signals() -> None:
    op.create_table(
        "job_signals",
        sa.Column("job_id", sa.Text(), nullable=False),
        sa.Column("key", sa.Text(), nullable=False),
        sa.Column("data", sa.Text(), nullable=True),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(
            ["job_id"], ["jobs.id"], name=op.f("fk_job_signals_job_id"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("job_id", "key", name=op.f("pk_job_signals")),
    )


def _create_method_marks() -> None:
    op.create_table(
        "method_marks",
        sa.Column("method", sa.Text(), nullable=False),
        sa.Column("lane", sa.Text(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("source", sa.Text(), nullable=False),
        sa.Column("marked_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("method", name=op.f("pk_method_marks")),
    )


def _create_leases() -> None:
    op.create_table(
        "leases",
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("owner", sa.Text(), nullable=True),
        sa.Column("lease_until", sa.DateTime(timezone=True), nullable=True),
        sa.Column("fence", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_leases")),
    )


def _create_downloads() -> None:
    op.create_table(
        "downloads",
        sa.Column("digest", sa.LargeBinary(), nullable=False),
        sa.Column("target", sa.Text(), nullable=False),
        sa.Column("request", sa.Text(), nullable=False),
        sa.Column("done_bytes", sa.BigInteger(), nullable=False),
        sa.Column("whole_bytes", sa.BigInteger(), nullable=True),
        sa.Column("report", sa.Text(), nullable=True),
        sa.Column("updated_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("owner", sa.Text(), nullable=True),
        sa.Column("lease_until", sa.DateTime(timezone=True), nullable=True),
        sa.Column("fence", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("digest", name=op.f("pk_downloads")),
    )
    op.create_index(op.f("ix_downloads_updated_at"), "downloads", ["updated_at"])
