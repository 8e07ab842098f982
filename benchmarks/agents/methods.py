"""The methods of a turn, for peers: what the plugin `bench_turn` does."""

from __future__ import annotations

__all__ = ["SYSTEM", "TOOLS", "measure", "report"]

#: What a peer without a prompt of its own says to the model.
SYSTEM = (
    "You answer people. You may write one Python block. It runs, and you see what it prints. It may call"
    " measure(number: int, text: str) -> dict, which counts one further, and"
    " report(number: int, text: str) -> str, which reports what was found."
)


async def measure(number: int, text: str) -> dict[str, int | str]:
    """Return the next number and the same text."""
    return {"number": number + 1, "text": text}


async def report(number: int, text: str) -> str:
    """Return a sentence for the next round."""
    return f"found {number} for {text}"


TOOLS = {"measure": measure, "report": report}
