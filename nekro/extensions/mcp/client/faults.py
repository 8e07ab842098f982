"""Errors of requests to servers: what became of the request, and of the session."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from mcp.shared.exceptions import MCPError
from mcp_types import REQUEST_TIMEOUT

from nekro.extensions.mcp.client.texts import line
from nekro.extensions.mcp.client.transport.bodies import Fate
from nekro.extensions.mcp.client.transport.messages import said_code
from nekro.extensions.mcp.client.transport.refusals import fate_of_error

__all__ = ["ServerFault", "fault_of"]

#: The SDK's words for requests that were open when the whole session ended.
_ALL_CLOSED: Final = "Connection closed"
_MOST_ERROR_CHARS: Final = 4_000
_FATES: Final = (Fate.NOT_SENT, Fate.DENIED, Fate.NO_SESSION, Fate.DOUBTFUL, Fate.UNKNOWN)


class ServerFault(Exception):
    """A request failed; the flags say what became of it."""

    def __init__(
        self,
        text: str,
        *,
        is_unsent: bool = False,
        is_refused: bool = False,
        is_doubtful: bool = False,
        is_lost: bool = False,
        is_late: bool = False,
        breaks_session: bool = False,
    ) -> None:
        """
        Args:
            is_unsent: the server did not run it, because it did not receive or accept it.
            is_refused: the server did not run it, because it does not know the session.
            is_doubtful: the server answered with an error that a lost session may have caused.
            is_lost: it is unknown whether the server ran it.
            is_late: the server did not answer in time.
            breaks_session: whether further requests need a new session.
        """
        super().__init__(text)
        self.is_unsent, self.is_refused, self.is_doubtful = is_unsent, is_refused, is_doubtful
        self.is_lost, self.is_late = is_lost, is_late
        self.breaks_session = breaks_session


def fault_of(exc: MCPError, *, hide: Callable[[str], str]) -> ServerFault:
    """Return the fault that an error of the SDK, of a transport or of the server stands for.

    Args:
        hide: removes secrets from texts.
    """
    text = hide(line(exc.message, _MOST_ERROR_CHARS))
    code = said_code(exc.code)
    if code is None and exc.code == REQUEST_TIMEOUT:
        return ServerFault("it did not answer in time; the request was cancelled", is_late=True)
    if code is None and exc.message == _ALL_CLOSED:
        return ServerFault("the connection to it was lost", is_lost=True, breaks_session=True)
    if code is None:  # over HTTP: the connection of this request only
        return ServerFault(text, is_lost=True)
    fate = exc.data if exc.data in _FATES else fate_of_error(code, exc.message)
    if fate is None:
        return ServerFault(text or f"it answered with the error {code}")
    return ServerFault(
        text,
        is_unsent=fate in (Fate.NOT_SENT, Fate.DENIED),
        is_refused=fate == Fate.NO_SESSION,
        is_doubtful=fate == Fate.DOUBTFUL,
        is_lost=fate == Fate.UNKNOWN,
        breaks_session=fate != Fate.UNKNOWN or text.startswith("the server cannot be reached"),
    )
