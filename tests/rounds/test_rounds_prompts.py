"""What rounds send to the model: kept only where the operator wants it, without secrets, within bounds."""

from __future__ import annotations

from typing import Any

import pytest
from round_bench import Bench, Model

from broker_config.settings import Settings
from nekro.agent.llm import LLMRequest
from nekro.base.redaction import Redactor
from nekro.cli.views.turn_text import turn_lines
from nekro.operations.turns import read_turn
from nekro_agent.errors import LLMError
from nekro_agent.execution.current import on_account
from nekro_client.models import Round
from storage.accounts.keys import NewKey
from storage.states import StoredKind, account_of_key

CHAT = "c"
SAY = 'send_msg_text(_ck, "done")'


@pytest.fixture
def kind() -> str:
    """One kind of database: the rows are tested on both."""
    return "sqlite"


def keeping(bench: Bench) -> Settings:
    agent = bench.settings.agent.model_copy(update={"keep_prompts": True})
    return bench.settings.model_copy(update={"agent": agent})


async def played(bench: Bench, text: str, model: Model, settings: Settings) -> Round:
    """Play a turn; returns its first round with its prompt."""
    await bench.say(CHAT, text)
    drain = bench.drain(model, settings=settings, redact=Redactor(["hunter2"]))
    rounds = await bench.play(CHAT, drain)
    turn = await read_turn(bench.services, rounds[-1].turn_id, with_prompts=True)
    return turn.rounds[0]


def texts(entry: Round) -> str:
    assert entry.prompt is not None
    return "\n".join(str(part["content"]) for message in entry.prompt for part in message.parts)


async def test_a_prompt_is_kept_without_secrets_only_if_the_operator_says_so(bench: Bench) -> None:
    model = Model(SAY)
    plain = await played(bench, "hello", model, bench.settings)
    assert (plain.prompt_kept, plain.prompt) == (False, None)
    kept = await played(bench, "the password is hunter2", model, keeping(bench))
    assert kept.prompt_kept and kept.prompt is not None
    assert kept.prompt[0].role == "system"
    assert "hunter2" in model.prompts[-1]
    assert "hunter2" not in texts(kept) and "the password is [secret]" in texts(kept)
    turn = await read_turn(bench.services, kept.turn_id)
    assert turn.rounds[0].prompt_kept and turn.rounds[0].prompt is None
    shown = await read_turn(bench.services, kept.turn_id, with_prompts=True)
    lines = [line.text for line in turn_lines(shown)]
    assert "    sent to the model: system" in lines
    assert any("the password is [secret]" in line for line in lines)


async def test_a_prompt_that_no_model_answered_is_kept_too(bench: Bench) -> None:
    async def fail(request: LLMRequest) -> str:
        raise LLMError("no answer")

    failed = await played(bench, "hello", Model(fail), keeping(bench))
    assert failed.state == "failed" and "hello" in texts(failed)


async def test_a_long_prompt_is_cut(bench: Bench) -> None:
    settings = keeping(bench)
    tokens = {"prompt_tokens": 400_000, "history_tokens": 100_000}
    settings = settings.model_copy(update={"agent": settings.agent.model_copy(update=tokens)})
    kept = await played(bench, "word " * 40_000, Model(SAY), settings)
    assert kept.prompt_chars is not None and kept.prompt_chars > 80_000
    assert 30_000 < len(texts(kept)) < 60_000


async def test_the_key_that_began_the_turn_is_charged_for_its_prompts(bench: Bench) -> None:
    async with bench.database.begin() as tx:
        await tx.keys.add(NewKey(id="k", name="k", digest=b"k", scopes=["post"], chats="*"))
    with on_account(account_of_key("k")):
        await bench.say(CHAT, "hello")
    await bench.play(CHAT, bench.drain(Model(SAY), settings=keeping(bench)))
    rows = await charged(bench)
    assert rows[StoredKind.PROMPTS] > 1024


async def charged(bench: Bench) -> dict[str, Any]:
    async with bench.database.read() as tx:
        found = await tx.connection.exec_driver_sql("SELECT kind, bytes FROM key_storage WHERE key_id = 'k'")
        return {row[0]: row[1] for row in found}
