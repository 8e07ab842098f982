"""Long texts in prompts are cut, and code reads the rest by the handle in the gap."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable

import pytest
from round_bench import Bench, Model

from nekro.agent.llm import LLMRequest
from nekro_agent.errors import ArgumentError
from nekro_agent.ports import MessageKind
from storage.repositories.messages import NewMessage
from workers.calls.built_in_targets import rest_of

pytestmark = pytest.mark.extended

OpenBench = Callable[..., Awaitable[Bench]]
CHAT = "onebot_v11-group_9"
SAY = 'send_msg_text(_ck, "done")'
LONG = 'print("".join(f"{number} " for number in range(9_000)))\nexit(9)'
GAP = re.compile(r'read_rest\("((?:round|message):[^"]+)", (\d+)\)')


@pytest.fixture(params=["sqlite", "postgres"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


async def test_code_reads_what_a_prompt_hides(kind: str, open_bench: OpenBench) -> None:
    bench = await open_bench(kind)
    gaps: list[tuple[str, str]] = []

    async def look(request: LLMRequest) -> str:
        """Read the rest of each text by its gap, as a model would."""
        gaps.extend(GAP.findall("\n".join(message.text for message in request.messages)))
        lines = [f"print(read_rest({handle!r}, {start}, most=12))" for handle, start in gaps]
        refused = "try:\n    read_rest('round:other')\nexcept Exception as exc:\n    print(exc)"
        return "\n".join([*lines, refused, "exit(9)"])

    drain = bench.drain(Model(LONG, look, SAY))
    await bench.say(CHAT, "".join(f"{number} " for number in range(8_000)))
    await bench.play(CHAT, drain)
    await drain.close()
    rounds = await bench.rounds(CHAT)
    output = rounds[1].output or ""
    whole = "".join(f"{number} " for number in range(9_000))
    assert {handle.partition(":")[0] for handle, _ in gaps} == {"round", "message"}
    for _, start in gaps:
        assert whole[int(start) : int(start) + 12].strip() in output
    assert "this chat has no text 'round:other'" in output


async def test_texts_of_other_chats_and_hidden_ones_are_not_found(kind: str, open_bench: OpenBench) -> None:
    bench = await open_bench(kind)
    drain = bench.drain(Model('print("secret " * 10); exit(9)', SAY))
    await bench.say("onebot_v11-group_1", "hello")
    await bench.play("onebot_v11-group_1", drain)
    await drain.close()
    (first, *_) = await bench.rounds("onebot_v11-group_1")
    async with bench.database.begin() as tx:
        await tx.chats.ensure(CHAT)
        for name, data in (("shown", None), ("recalled", {"is_recalled": True}), ("quiet", {"hidden": True})):
            await tx.messages.append(
                NewMessage(id=name, chat_key=CHAT, kind=MessageKind.USER, text=f"text of {name}", data=data)
            )

    async def read(handle: object, start: object = 0, most: object = 10) -> str:
        async with bench.database.read() as tx:
            return await rest_of(tx, CHAT, handle, start=start, most=most)

    assert await read("message:shown", 5, 2) == "of" and await read("message:shown", 50) == ""
    for handle in (
        f"round:{first.id}", "message:recalled", "message:quiet", "message:none", "call:none", "call:none#1",
        "shown", "", None, 3, "round:", "message:shown#0",
    ):  # fmt: skip
        with pytest.raises(ArgumentError, match="this chat has no text"):
            await read(handle)
    for start, most in ((-1, 10), (True, 10), (0, 0), (0, 2_000_000), ("0", 10)):
        with pytest.raises(ArgumentError, match="must be a number"):
            await read("message:shown", start, most)
