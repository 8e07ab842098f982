"""Keep by what turns are found: state, cost, the models that answered, the plugins that were called."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Final

import sqlalchemy as sa
from alembic import op

revision = "0026"
down_revision = "0025"
branch_labels = None
depends_on = None

_BATCH: Final = 500
_NAME_CHARS: Final = 150
#: States from the events that ended turns; where they have expired, that of the first round.
_STATES: Final = """
UPDATE rounds SET
    turn_cost = (SELECT sum(part.cost) FROM rounds AS part WHERE part.turn_id = rounds.turn_id),
    turn_state = coalesce(
        (SELECT CASE
            WHEN ended.data LIKE '{"state": "done"%' THEN 'done'
            WHEN ended.data LIKE '{"state": "failed"%' THEN 'failed'
            WHEN ended.data LIKE '{"state": "cancelled"%' THEN 'cancelled'
            WHEN ended.data LIKE '{"state": "waiting"%' THEN 'waiting' END
         FROM chat_events AS ended
         WHERE ended.turn_id = rounds.turn_id AND ended.type = 'turn.ended' LIMIT 1),
        CASE WHEN state IN ('failed', 'cancelled') THEN state ELSE 'done' END)
WHERE id = turn_id AND turn_state IS NULL
    AND NOT EXISTS (
        SELECT 1 FROM rounds AS part LEFT JOIN rounds AS taker ON taker.id = part.merged_into
        WHERE part.turn_id = rounds.turn_id
            AND (part.state IN ('requested', 'running') OR taker.state IN ('requested', 'running')))
"""
_ROUNDS: Final = """
SELECT part.sequence, part.model, part.calls, first.sequence, first.requested_at
FROM rounds AS part JOIN rounds AS first ON first.id = part.turn_id
WHERE part.sequence > :after ORDER BY part.sequence LIMIT :batch
"""
_ADD: Final = """
INSERT INTO turn_terms (sequence, term, requested_at) VALUES (:sequence, :term, :requested_at)
ON CONFLICT DO NOTHING
"""


def upgrade() -> None:
    op.add_column("rounds", sa.Column("turn_state", sa.Text(), nullable=True))
    op.add_column("rounds", sa.Column("turn_cost", sa.Double(), nullable=True))
    op.create_table(
        "turn_terms",
        sa.Column("sequence", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("term", sa.Text(), nullable=False),
        sa.Column("requested_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(
            ["sequence"],
            ["rounds.sequence"],
            name=op.f("fk_turn_terms_sequence_rounds"),
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("sequence", "term", name=op.f("pk_turn_terms")),
    )
    op.create_table(
        "round_prompts",
        sa.Column("round_id", sa.Text(), nullable=False),
        sa.Column("prompt", sa.Text(), nullable=False),
        sa.Column("sent_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(
            ["round_id"], ["rounds.id"], name=op.f("fk_round_prompts_round_id_rounds"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("round_id", name=op.f("pk_round_prompts")),
    )
    op.create_index(op.f("ix_round_prompts_sent_at"), "round_prompts", ["sent_at"])
    op.execute(sa.text(_STATES.replace(":", r"\:")))
    _add_terms()
    first = sa.text("id = turn_id")
    op.create_index(
        "ix_rounds_turns",
        "rounds",
        ["requested_at", "sequence", "chat_key", "turn_cost"],
        postgresql_where=first,
        sqlite_where=first,
    )
    op.create_index(
        "ix_rounds_turn_state",
        "rounds",
        ["turn_state", "requested_at", "sequence"],
        postgresql_where=first,
        sqlite_where=first,
    )
    op.create_index("ix_turn_terms_term", "turn_terms", ["term", "requested_at", "sequence"])


def _add_terms() -> None:
    connection = op.get_bind()
    after = 0
    while rows := connection.execute(sa.text(_ROUNDS), {"after": after, "batch": _BATCH}).all():
        added = [
            {"sequence": row[3], "term": term, "requested_at": row[4]}
            for row in rows
            for term in _terms(row[1], row[2])
        ]
        if added:
            connection.execute(sa.text(_ADD), added)
        after = rows[-1][0]


def _terms(model: str | None, calls: str | None) -> Iterator[str]:
    if model is not None:
        yield f"model:{model[:_NAME_CHARS]}"
    called = {call["method"].rpartition(".")[0] for call in json.loads(calls or "[]")}
    yield from (f"plugin:{key[:_NAME_CHARS]}" for key in sorted(called) if key)


def downgrade() -> None:
    op.drop_table("round_prompts")
    op.drop_table("turn_terms")
    op.drop_index("ix_rounds_turn_state", "rounds")
    op.drop_index("ix_rounds_turns", "rounds")
    op.drop_column("rounds", "turn_cost")
    op.drop_column("rounds", "turn_state")
