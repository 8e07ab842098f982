"""Add users, presets and the state of channels; record the channels of older chats and who wrote in them."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from nekro_agent.layout import channel_of
from storage.sql import FaithfulText, UtcDateTime, now

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None

#: Only the columns that the copy of data needs, in their state of this revision.
_CHATS = sa.table(
    "chats",
    sa.column("chat_key", FaithfulText()),
    sa.column("adapter_key", FaithfulText()),
    sa.column("channel_id", FaithfulText()),
    sa.column("channel_type", FaithfulText()),
)
_MESSAGES = sa.table(
    "messages",
    sa.column("sequence", sa.BigInteger()),
    sa.column("chat_key", FaithfulText()),
    sa.column("kind", sa.Text()),
    sa.column("sender_id", FaithfulText()),
    sa.column("sender_name", FaithfulText()),
)
_USERS = sa.table(
    "users",
    sa.column("adapter_key", FaithfulText()),
    sa.column("platform_userid", FaithfulText()),
    sa.column("username", FaithfulText()),
    sa.column("perm_level", sa.Integer()),
    sa.column("created_at", UtcDateTime()),
    sa.column("updated_at", UtcDateTime()),
)


def upgrade() -> None:
    _add_columns()
    _create_users()
    _create_presets()
    _record_channels()
    _record_users()


def downgrade() -> None:
    op.drop_table("presets")
    op.drop_table("users")
    # Not in a batch; see 0002.
    for name in ("history_revision", "observe_mode", "is_active", "preset_id", "reset_at"):
        op.drop_column("chats", name)


def _add_columns() -> None:
    # An older release adds rows without these columns, so each has a default of the server.
    op.add_column("chats", sa.Column("reset_at", sa.DateTime(timezone=True), nullable=True))
    op.add_column("chats", sa.Column("preset_id", sa.BigInteger(), nullable=True))
    op.add_column("chats", sa.Column("is_active", sa.Boolean(), nullable=False, server_default=sa.true()))
    op.add_column("chats", sa.Column("observe_mode", sa.Boolean(), nullable=False, server_default=sa.false()))
    op.add_column(
        "chats", sa.Column("history_revision", sa.BigInteger(), nullable=False, server_default=sa.text("0"))
    )


def _id() -> sa.Column[int]:
    return sa.Column(
        "id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), sa.Identity(), nullable=False
    )


def _create_users() -> None:
    op.create_table(
        "users",
        _id(),
        sa.Column("adapter_key", sa.Text(), nullable=False),
        sa.Column("platform_userid", sa.Text(), nullable=False),
        sa.Column("username", sa.Text(), nullable=False),
        sa.Column("perm_level", sa.Integer(), nullable=False),
        sa.Column("ban_until", sa.DateTime(timezone=True), nullable=True),
        sa.Column("prevent_trigger_until", sa.DateTime(timezone=True), nullable=True),
        sa.Column("ext_data", sa.Text(), nullable=True),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("updated_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_users")),
        sqlite_autoincrement=True,
    )
    op.create_index(
        "uq_users_platform_userid_adapter_key", "users", ["platform_userid", "adapter_key"], unique=True
    )


def _create_presets() -> None:
    texts = ("name", "title", "avatar", "content", "description", "tags", "author")
    op.create_table(
        "presets",
        _id(),
        *(sa.Column(name, sa.Text(), nullable=False) for name in texts),
        sa.Column("remote_id", sa.Text(), nullable=True),
        sa.Column("on_shared", sa.Boolean(), nullable=False),
        sa.Column("ext_data", sa.Text(), nullable=True),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("updated_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_presets")),
        sqlite_autoincrement=True,
    )


def _record_channels() -> None:
    """Fill what the keys of older chats say.

    Chats that an older release adds later are read in the same way (``ChatInfo``).
    """
    connection = op.get_bind()
    columns = ("adapter_key", "channel_id", "channel_type")
    unknown = sa.or_(*(_CHATS.c[name].is_(None) for name in columns))
    rows = connection.execute(sa.select(_CHATS).where(unknown)).all()
    values = [
        {"of_chat": row.chat_key, **channel_of(row.chat_key)._asdict()}
        for row in rows
        if any(channel_of(row.chat_key))
    ]
    if values:
        change = (
            sa.update(_CHATS)
            .where(_CHATS.c.chat_key == sa.bindparam("of_chat"))
            .values({name: sa.func.coalesce(_CHATS.c[name], sa.bindparam(name)) for name in columns})
        )
        connection.execute(change, values)


def _record_users() -> None:
    """Add everyone who has written, with the name of the newest message."""
    adapter = sa.func.coalesce(_CHATS.c.adapter_key, "")
    newest = (
        sa.select(sa.func.max(_MESSAGES.c.sequence).label("sequence"), adapter.label("adapter_key"))
        .select_from(_MESSAGES.join(_CHATS, _CHATS.c.chat_key == _MESSAGES.c.chat_key))
        .where(_MESSAGES.c.kind == "user", _MESSAGES.c.sender_id.is_not(None), _MESSAGES.c.sender_id != "")
        .group_by(adapter, _MESSAGES.c.sender_id)
        .subquery()
    )
    people = sa.select(
        newest.c.adapter_key,
        _MESSAGES.c.sender_id,
        sa.func.coalesce(_MESSAGES.c.sender_name, ""),
        sa.literal(0),
        now(),
        now(),
    ).join(newest, newest.c.sequence == _MESSAGES.c.sequence)
    op.get_bind().execute(sa.insert(_USERS).from_select([column.name for column in _USERS.columns], people))
