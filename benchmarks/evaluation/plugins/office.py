"""An office: colleagues, rooms, a handbook, weather, and payments and letters that a person approves."""

from __future__ import annotations

from typing import Any, Final

from nekro_agent.api.plugin import NekroPlugin, SandboxMethodType
from nekro_agent.api.schemas import AgentCtx

from ._effects import note_effect

plugin = NekroPlugin(
    name="Office",
    module_name="office",
    description="Colleagues, meeting rooms, the handbook, payments and letters.",
    version="1.0.0",
    author="eval",
    url="",
)

_MANAGERS: Final = {"Ken": "Lis", "Mia": "Lis", "Lis": "Tom", "Tom": "Eva", "Bo": "Tom"}
_WEATHER: Final = {"Oslo": 4, "Rome": 19, "Lima": 23, "Kyiv": 9, "Cairo": 31}
#: Room: seats, free hours.
_ROOMS: Final[dict[str, tuple[int, list[int]]]] = {
    "Fjord": (4, [9, 10, 14]),
    "Delta": (12, [11]),
    "Canyon": (8, [15, 16]),
    "Lagoon": (10, [10, 15]),
}
_HANDBOOK: Final = {
    "travel": "Trips by train are booked by the traveller. Hotels: up to 140 EUR a night. Form: T-7.",
    "equipment": "A laptop lasts four years. Requests go to Mia with the form E-2.",
    "leave": "Leave is 28 days a year. Unused days expire on 31 March. Form: L-1.",
}


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "Manager", "Manager of a colleague.")
async def manager_of(_ctx: AgentCtx, name: str) -> str | None:
    """Return who manages a colleague; None at the top.

    Args:
        name (str): First name.
    """
    if name not in {*_MANAGERS, *_MANAGERS.values()}:
        raise ValueError(f"there is no colleague {name!r}")
    return _MANAGERS.get(name)


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "Temperature", "Temperature in a city.")
async def temperature(_ctx: AgentCtx, city: str) -> int:
    """Return the temperature in a city in degrees Celsius.

    Args:
        city (str): Name of the city.
    """
    if city not in _WEATHER:
        raise ValueError(f"no station in {city!r}")
    return _WEATHER[city]


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "List rooms", "List the meeting rooms.")
async def list_rooms(_ctx: AgentCtx) -> list[str]:
    """Return the names of the meeting rooms."""
    return list(_ROOMS)


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "Read a room", "Seats and free hours of a room.")
async def read_room(_ctx: AgentCtx, room: str) -> dict[str, Any]:
    """Return the seats of a room and the hours at which it is free today.

    Args:
        room (str): As `list_rooms` returns it.
    """
    if room not in _ROOMS:
        raise ValueError(f"there is no room {room!r}")
    seats, free = _ROOMS[room]
    return {"room": room, "seats": seats, "free": free}


@plugin.mount_sandbox_method(SandboxMethodType.BEHAVIOR, "Book a room", "Book a meeting room.")
async def book_room(_ctx: AgentCtx, room: str, hour: int) -> str:
    """Book a room for an hour of today.

    Args:
        room (str): As `list_rooms` returns it.
        hour (int): A free hour, as `read_room` returns it.
    """
    if room not in _ROOMS or hour not in _ROOMS[room][1]:
        raise ValueError(f"{room!r} is not free at {hour}")
    note_effect(plugin, _ctx, "booking", room=room, hour=hour)
    return f"{room} is booked at {hour}."


@plugin.mount_sandbox_method(SandboxMethodType.AGENT, "Search the handbook", "Search the handbook.")
async def search_handbook(_ctx: AgentCtx, word: str) -> str:
    """Search the handbook and look at the sections found in the next round.

    Args:
        word (str): A word.
    """
    found = [name for name, text in _HANDBOOK.items() if word.lower() in f"{name} {text}".lower()]
    return f"Sections with {word!r}: {', '.join(found) or 'none'}"


@plugin.mount_sandbox_method(SandboxMethodType.AGENT, "Read the handbook", "Read a section of the handbook.")
async def read_handbook(_ctx: AgentCtx, section: str) -> str:
    """Look at a section of the handbook in the next round.

    Args:
        section (str): As `search_handbook` returns it.
    """
    if section not in _HANDBOOK:
        raise ValueError(f"there is no section {section!r}")
    return _HANDBOOK[section]


@plugin.mount_sandbox_method(
    SandboxMethodType.TOOL, "Pay", "Pay an amount; a person approves it.", requires_approval=True
)
async def pay(_ctx: AgentCtx, who: str, amount: float) -> str:
    """Pay a person; the program waits until another person has approved it.

    Args:
        who (str): Who gets it.
        amount (float): EUR.
    """
    note_effect(plugin, _ctx, "payment", who=who, amount=amount)
    return f"Paid {amount:g} EUR to {who}, receipt R-{len(who)}{int(amount)}."


@plugin.mount_sandbox_method(
    SandboxMethodType.TOOL, "Write a letter", "Send a letter; a person approves it.", requires_approval=True
)
async def send_letter(_ctx: AgentCtx, to: str, text: str) -> str:
    """Send a letter; a person has to approve it, and the program waits for that.

    Args:
        to (str): Name of the receiver.
        text (str): The letter.
    """
    note_effect(plugin, _ctx, "letter", to=to, text=text)
    return f"The letter to {to} is on its way."
