"""The schema of release 0.2.0, the oldest that is migrated; it has no statements.

A database of 0.2.0 has this revision already, and a new one is created from ``storage.tables`` at once.

Five foreign keys have other names there: ``fk_approvals_chat_key_chats``,
``fk_chat_summaries_chat_key_chats``, ``fk_round_prompts_round_id_rounds``, ``fk_turn_terms_sequence_rounds``
and ``fk_turn_variables_chat_key_chats``. A new database names them without the last word. A revision that
drops one of them has to look up its name.
"""

from __future__ import annotations

revision = "0028"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Nothing to do; see above."""


def downgrade() -> None:
    """Nothing to do; see above."""
