"""Rows of responses of the OpenAI-compatible API."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime

from nekro.extensions.openai.rows import ResponseRows, StoredResponse
from storage.engine import Database

KEPT = StoredResponse(
    id="resp_1", key_id=None, chat_key="c", turn_id="t", previous_id="resp_0", model="nekro",
    is_background=True, stated={"metadata": {"a": "b"}},
    created_at=datetime(2026, 1, 2, 3, 4, 5, 678, tzinfo=UTC),
)  # fmt: skip


async def test_a_response_is_kept_once_found_and_deleted(database: Database) -> None:
    for response in (KEPT, replace(KEPT, model="another")):
        async with database.begin() as transaction:
            await ResponseRows(transaction.connection).add(response)
    async with database.begin() as transaction:
        assert await ResponseRows(transaction.connection).find("resp_1") == KEPT
        assert await ResponseRows(transaction.connection).find("resp_2") is None
        assert await ResponseRows(transaction.connection).delete("resp_1")
        assert not await ResponseRows(transaction.connection).delete("resp_1")
        assert await ResponseRows(transaction.connection).find("resp_1") is None
