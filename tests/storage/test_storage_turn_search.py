"""Turns by what people look for: exact pages in order, without reading all turns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import text as sql

from nekro_agent.shared_clock import shared_time
from storage.engine import Database
from storage.listings.chats import TurnFilter, TurnPosition, terms_of
from storage.repositories.rounds import Round, RoundReport, RoundRequest
from storage.states import RoundState, TriggerKind
from storage.transaction import Transaction

FAILED, DONE = "failed", "done"


async def _turn(
    tx: Transaction,
    chat_key: str = "chat",
    *,
    state: str | None = DONE,
    cost: float | None = 1,
    model: str | None = "m1",
    called: Sequence[str] = (),
    rounds: int = 1,
) -> Round:
    """Add a turn whose rounds have ended; with the state None the turn goes on. Returns its first round."""
    await tx.chats.ensure(chat_key)
    fence = await tx.chats.acquire(chat_key, owner="w", lease_seconds=60)
    assert fence is not None
    first: Round | None = None
    for number in range(1, rounds + 1):
        request = RoundRequest(
            chat_key=chat_key,
            trigger_kind=TriggerKind.MANUAL,
            trigger_id=f"{chat_key}-{shared_time().timestamp()}-{number}",
            turn_id=first and first.id,
            number=number,
        )
        await tx.rounds.request(request)
        claimed = await tx.rounds.claim_next(chat_key, fence=fence, worker="w")
        assert claimed is not None
        calls = [{"method": method} for method in called]
        report = RoundReport(model=model, cost=cost, calls=calls)
        ended = await tx.rounds.finish(claimed.round.id, fence=fence, state=RoundState.DONE, report=report)
        first = first or ended
        await tx.turn_search.add_round(ended)
    assert first is not None
    if state is not None:
        await tx.turn_search.end_turn(first.id, state)
    await tx.chats.release(chat_key, fence=fence)
    return first


async def _ids(tx: Transaction, *states: str | None, limit: int = 50, **wanted: Any) -> list[str]:
    """Return the turns of all pages."""
    found: list[str] = []
    after: TurnPosition | None = None
    while True:
        page = await tx.turn_search.page(
            TurnFilter(**wanted), states=states or None, limit=limit, after=after
        )
        found += [item.id for item in page]
        if len(page) < limit:
            return found
        after = TurnPosition(requested_at=page[-1].requested_at, sequence=page[-1].sequence)


async def test_each_filter_finds_its_turns_and_all_of_them_fit_together(database: Database) -> None:
    async with database.begin() as tx:
        plain = await _turn(tx)
        failed = await _turn(tx, "other", state=FAILED, cost=None, model=None)
        dear = await _turn(tx, cost=2.5, rounds=2, model="m2", called=["a.b.f", "a.b.g", "c.d.f"])
        open_ = await _turn(tx, "other", state=None, called=["a.bc.f", *(f"p.q{n}.f" for n in range(9))])
        all_ = [open_.id, dear.id, failed.id, plain.id]
        assert await _ids(tx) == all_
        assert await _ids(tx, FAILED) == [failed.id]
        assert await _ids(tx, None, DONE) == [open_.id, dear.id, plain.id]
        assert await _ids(tx, min_cost=5) == [dear.id]
        assert await _ids(tx, min_cost=1) == [dear.id, plain.id]
        assert await _ids(tx, model="m1") == [open_.id, plain.id]
        assert await _ids(tx, plugin="a.b") == [dear.id]
        assert await _ids(tx, plugin="p.q8") == [open_.id]
        assert await _ids(tx, plugin="a.b", model="m1") == []
        assert await _ids(tx, plugin="c.d", model="m2", chat_key="chat", min_cost=5) == [dear.id]
        assert await _ids(tx, DONE, chat_key="chat") == [dear.id, plain.id]
        assert await _ids(tx, prefix="oth") == [open_.id, failed.id]
        assert await _ids(tx, prefix="OTH") == []
        assert await _ids(tx, since=failed.requested_at, until=open_.requested_at) == [dear.id, failed.id]
        for limit in (1, 2, 3):
            assert await _ids(tx, limit=limit) == all_
            assert await _ids(tx, None, DONE, FAILED, limit=limit) == all_
            assert await _ids(tx, model="m1", limit=limit) == [open_.id, plain.id]


async def test_pages_have_every_turn_once_also_among_those_of_one_moment(database: Database) -> None:
    async with database.begin() as tx:
        turns = [await _turn(tx, f"chat{number}", called=["a.b.f"]) for number in range(5)]
        for table in ("rounds", "turn_terms"):
            statement = sql(f"UPDATE {table} SET requested_at = (SELECT min(requested_at) FROM {table})")
            await tx.connection.execute(statement)
        wanted = [turn.id for turn in turns[::-1]]
        assert await _ids(tx, limit=2) == wanted
        assert await _ids(tx, DONE, limit=2) == wanted
        assert await _ids(tx, plugin="a.b", limit=2) == wanted


async def test_names_of_any_length_and_characters_are_found(database: Database) -> None:
    name = "\x00\ud800" * 300
    async with database.begin() as tx:
        turn = await _turn(tx, model=name, called=[f"{name}.f", "no_plugin"])
        assert await _ids(tx, model=name) == await _ids(tx, plugin=name) == [turn.id]


async def test_known_terms_are_not_written_again(database: Database) -> None:
    async with database.begin() as tx:
        turn = await _turn(tx, called=["a.b.f"])
        assert terms_of(turn) == ["plugin:a.b", "model:m1"]
        more = replace(turn, calls=[{"method": "a.b.f"}, {"method": "c.d.f"}], model="m")
        await tx.turn_search.add_round(more, known=terms_of(turn))
        found = await tx.connection.execute(sql("SELECT term FROM turn_terms ORDER BY term"))
        assert found.scalars() == ["model:m", "model:m1", "plugin:a.b", "plugin:c.d"]


async def test_terms_go_with_their_round(database: Database) -> None:
    async with database.begin() as tx:
        turn = await _turn(tx, called=["a.b.f"])
        await tx.turn_search.add_round(turn)  # a transaction whose outcome was unknown is written again
        await tx.connection.execute(sql("DELETE FROM rounds"))
        left = await tx.connection.execute(sql("SELECT count(*) FROM turn_terms"))
    assert left.scalar() == 0


_PLANS: dict[str, tuple[TurnFilter, str | None]] = {
    "ix_rounds_turns": (TurnFilter(min_cost=1, prefix="a"), None),
    "ix_rounds_turn_state": (TurnFilter(since=shared_time() - timedelta(days=1)), FAILED),
    "ix_turn_terms_term": (TurnFilter(plugin="a.b", model="m", min_cost=1), None),
    "ix_rounds_chat_key_sequence": (TurnFilter(chat_key="chat", model="m"), None),
}


@pytest.mark.parametrize("index", _PLANS)
async def test_a_page_is_read_from_an_index_that_has_its_order(
    database: Database, index: str, watch_statements: Callable[[Transaction], list[tuple[str, Any]]]
) -> None:
    wanted, state = _PLANS[index]
    after = TurnPosition(requested_at=shared_time(), sequence=9)
    async with database.begin() as tx:
        if not database.is_sqlite:
            # Empty tables are scanned and sorted faster than any index; see what large ones would use.
            for name in ("enable_seqscan", "enable_bitmapscan", "enable_sort", "enable_hashjoin"):
                await tx.connection.exec_driver_sql(f"SET LOCAL {name} = off")
        statements = watch_statements(tx)
        states = None if state is None else [state]
        await tx.turn_search.page(wanted, states=states, limit=50, after=after)
        statement, parameters = statements[-1]
        explain = "EXPLAIN QUERY PLAN" if database.is_sqlite else "EXPLAIN"
        plan = await tx.connection.exec_driver_sql(f"{explain} {statement}", parameters)
        lines = "\n".join(str(tuple(row)) for row in plan)
    assert index in lines and "TEMP B-TREE" not in lines and "Sort" not in lines, lines
