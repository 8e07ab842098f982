"""Signatures of every kind: what the code passes arrives as it is, whatever the annotation says."""

import enum
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Dict, List, Literal, Optional, Tuple, TypedDict, Union  # noqa: UP035

from nekro_agent.api.plugin import NekroPlugin, SandboxMethodType
from nekro_agent.api.schemas import AgentCtx

plugin = NekroPlugin("annotated", "annotated", "Signatures of every kind", "1.0.0", "Ada", "https://example.com")


class Colour(str, enum.Enum):
    RED = "red"
    BLUE = "blue"


class Place(TypedDict, total=False):
    city: str
    at: Tuple[float, float]


@dataclass
class Reading:
    place: Place
    colour: Colour
    taken: datetime


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "读数", description="One reading of many types")
async def take_reading(
    _ctx: AgentCtx,
    /,
    place: Place,
    colour: "Colour" = Colour.RED,
    *,
    unit: Literal["C", "F"] = "C",
    notes: Optional[List[str]] = None,
    extra: Union[int, str, None] = None,
    limit: int | None = None,
) -> Reading:
    """Take one reading."""
    notes = notes or []
    assert isinstance(unit, str) and (limit is None or isinstance(limit, int)), (unit, limit, extra, notes)
    return Reading(place=place, colour=Colour(colour), taken=datetime(2026, 1, 2, 3, 4, 5))


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "long doc")
async def long_doc(_ctx: AgentCtx) -> int:
    return len(long_doc.__doc__ or "")


long_doc.__doc__ = "Return how long this text is.\n\n" + "    One more line of it.\n" * 3000


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "basket")
async def add_to_basket(_ctx: AgentCtx, item: str, basket: List[str] = []) -> List[str]:  # noqa: B006
    """A default that is shared between calls, as in any Python function."""
    basket.append(item)
    return basket


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "only by keyword")
async def search(_ctx: AgentCtx, *, query: str, filters: Dict[str, Any] = {"lang": "en"}) -> Dict[str, Any]:  # noqa: B006
    """Everything by keyword."""
    return {"query": query, **filters}


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "anything")
async def anything(*args, **kwargs):
    """No parameter has a name."""
    return [args[0].chat_key, list(args[1:]), kwargs]


@plugin.mount_sandbox_method(SandboxMethodType.AGENT, "counts")
async def count_up(_ctx: AgentCtx, end: int):
    """Yields instead of returning: not a result that can travel."""
    for number in range(end):
        yield number


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "lines")
def read_lines(_ctx: AgentCtx, text: str):
    """The same with an ordinary generator."""
    yield from text.splitlines()
