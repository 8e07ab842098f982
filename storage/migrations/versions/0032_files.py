"""Files in a store of objects: areas, contents and entries."""

from __future__ import annotations

from typing import Any

from alembic import op
from sqlalchemy import BigInteger, Boolean, Column, ForeignKey, Identity, Integer, text

from storage.sql import FaithfulText, KeyText, UtcDateTime

revision = "0032"
down_revision = "0031"
branch_labels = None
depends_on = None

_ID = BigInteger().with_variant(Integer, "sqlite")


def _id() -> Column[Any]:
    return Column("id", _ID, Identity(), primary_key=True)


def upgrade() -> None:
    """Create the tables; no earlier release uses them."""
    op.create_table(
        "file_areas",
        _id(),
        Column("name", KeyText(), nullable=False, unique=True),
        Column("version", BigInteger(), nullable=False),
        Column("names", BigInteger(), nullable=False),
        Column("bytes", BigInteger(), nullable=False),
        Column("changed_at", UtcDateTime(), nullable=False),
        sqlite_autoincrement=True,
    )
    op.create_table(
        "file_contents",
        _id(),
        Column("sha256", FaithfulText(), nullable=False, unique=True),
        Column("bytes", BigInteger(), nullable=False),
        Column("is_stored", Boolean(), nullable=False),
        Column("media_type", FaithfulText()),
        Column("used_at", UtcDateTime(), nullable=False, index=True),
        sqlite_autoincrement=True,
    )
    op.create_table(
        "file_parts",
        Column("content_id", _ID, ForeignKey("file_contents.id", ondelete="CASCADE"), primary_key=True),
        Column("number", Integer(), primary_key=True, autoincrement=False),
        Column("part_id", _ID, ForeignKey("file_contents.id"), nullable=False, index=True),
    )
    op.create_table(
        "file_entries",
        Column("area_id", _ID, ForeignKey("file_areas.id", ondelete="CASCADE"), primary_key=True),
        Column("folded", FaithfulText(), primary_key=True),
        Column("since", BigInteger(), primary_key=True, autoincrement=False),
        Column("until", BigInteger()),
        Column("path", FaithfulText(), nullable=False),
        Column("parent", FaithfulText(), nullable=False),
        Column("content_id", _ID, ForeignKey("file_contents.id"), index=True),
        Column("is_executable", Boolean(), nullable=False),
        Column("modified_ns", BigInteger(), nullable=False),
        Column("added_at", UtcDateTime(), nullable=False),
        Column("ended_at", UtcDateTime(), index=True),
    )
    present = text("until IS NULL")
    for name, columns, is_unique in (
        ("ix_file_entries_present", ["area_id", "folded"], True),
        ("ix_file_entries_parent", ["area_id", "parent"], False),
    ):
        op.create_index(
            name, "file_entries", columns, unique=is_unique, sqlite_where=present, postgresql_where=present
        )
    op.create_index("ix_file_entries_since", "file_entries", ["area_id", "since"])
    ended = text("until IS NOT NULL")
    op.create_index(
        "ix_file_entries_until",
        "file_entries",
        ["area_id", "until"],
        sqlite_where=ended,
        postgresql_where=ended,
    )


def downgrade() -> None:
    """Remove them; the contents stay in the store."""
    for name in ("file_entries", "file_parts", "file_contents", "file_areas"):
        op.drop_table(name)
