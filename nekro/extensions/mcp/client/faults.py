"""What became of a request to a server, and of its session: refusals, and errors as faults.

Implementations use many statuses and wordings for a session that they do not know (any more): 404 with and
without a body, 400, 401, 409, 410 and 422, JSON-RPC errors with codes of their own, also with status 200.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from mcp.shared.exceptions import MCPError
from mcp_types import INTERNAL_ERROR, INVALID_PARAMS, INVALID_REQUEST, METHOD_NOT_FOUND, REQUEST_TIMEOUT

from nekro.extensions.mcp.client.bodies import Fate
from nekro.extensions.mcp.client.messages import messages_of, said_code
from nekro.extensions.mcp.client.tools import line

__all__ = [
    "Refusal",
    "ServerFault",
    "fate_of_error",
    "fault_of",
    "refusal_of",
]


#: Methods that open a session.
_OPENING: Final = ("initialize", "server/discover")
#: The server does not have a session any more, by the protocol and by HTTP.
_GONE: Final = (404, 410)
#: Statuses of a server that did not run the request.
_REFUSING: Final = (400, 401, 403, 404, 409, 410, 412, 422, 428)
#: Statuses of proxies, which may have passed the request on before.
_OF_PROXIES: Final = (502, 503, 504, 520, 521, 522, 523, 524, 525, 526, 527)
#: A request of the protocol about something else; the session is known.
_OF_METHODS: Final = (METHOD_NOT_FOUND, INVALID_PARAMS, INTERNAL_ERROR)

_RESOURCE_NOT_FOUND: Final = -32002

_SESSION_NOT_FOUND: Final = -32001

_WORDS: Final = re.compile(
    r"session|not\b.{0,20}\binitiali[sz]ed|initiali[sz]e\b|initiali[sz]ation", re.IGNORECASE
)
#: Words that no tool uses for sessions of its own.
_OF_PROTOCOL: Final = re.compile(
    r"mcp[- ]session|no valid session|during session initiali[sz]ation|"
    r"before\b.{0,20}\binitiali[sz]|expect\w{0,3}\b.{0,20}\binitiali[sz]e|"
    r"\b(?:server|client|connection|transport|mcp)\b.{0,20}\bnot\b.{0,20}\binitiali[sz]ed|"
    r"\A\W{0,8}(?:bad request:\s{0,4})?not (?:yet )?initiali[sz]ed\W{0,8}\Z",
    re.IGNORECASE,
)
#: A session that is not there, in the words of servers.
_NO_SESSION: Final = re.compile(
    r"\b(?:no|unknown|invalid|expired|missing|stale|inactive)\b.{0,20}\bsession|"
    r"\bsession\b.{0,60}\b(?:not found|not exist|expired|unknown|invalid|terminated|closed|gone|missing)",
    re.IGNORECASE,
)

_MOST_TEXT_CHARS: Final = 500
#: Of an error of a server, in which the words are looked for.
_MOST_SEARCHED_CHARS: Final = 2_000


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """An answer with an error status, as the error of its request."""

    text: str
    code: int = INTERNAL_ERROR
    #: One of ``Fate``, or what the server sent; None without either.
    data: Any = None


def refusal_of(status: int, body: bytes, *, method: str, has_session: bool) -> Refusal:
    """Return what a status of 400 or more means for a request.

    Args:
        has_session: whether the request named a session.
    """
    error = next((message["error"] for message in messages_of(body) if "error" in message), None)
    shown = line(body.decode("utf-8", "replace"), _MOST_TEXT_CHARS)
    text = f"the server answered with status {status}{': ' if shown else ''}{shown}"
    if method not in _OPENING:
        fate = _fate(
            status, error, shown if error is None else str(error["message"]), has_session=has_session
        )
        if fate is not None:
            return Refusal(text=text if error is None else str(error["message"]) or text, data=fate)
    if error is not None:
        return Refusal(text=str(error["message"]) or text, code=error["code"], data=error.get("data"))
    return Refusal(text=text)


def _fate(status: int, error: dict[str, Any] | None, words: str, *, has_session: bool) -> str | None:
    code = None if error is None else said_code(error["code"])
    is_about_session = _WORDS.search(words[:_MOST_SEARCHED_CHARS]) is not None
    if code in _OF_METHODS and not _OF_PROTOCOL.search(words[:_MOST_SEARCHED_CHARS]):
        return None
    if code == _RESOURCE_NOT_FOUND and not is_about_session:
        return None
    if status in _REFUSING and is_about_session:
        return Fate.NO_SESSION
    # With 400 the server says that it did not process the request, in whatever words.
    if has_session and status in (*_GONE, 400):
        return Fate.NO_SESSION
    if has_session and _NO_SESSION.search(words[:_MOST_SEARCHED_CHARS]):
        return Fate.NO_SESSION
    return Fate.UNKNOWN if status in _OF_PROXIES and error is None else None


def fate_of_error(code: int, text: str) -> str | None:
    """Return the fate of a request whose answer is an error of the server with any status; None: it ran.

    Tools have sessions of their own, so that the words must be those of the protocol.
    """
    searched = text[:_MOST_SEARCHED_CHARS]
    if code == INTERNAL_ERROR:
        return None
    if _OF_PROTOCOL.search(searched) or (code == _SESSION_NOT_FOUND and "session" in searched.lower()):
        return Fate.NO_SESSION
    is_of_transport = code in (-32000, INVALID_REQUEST, _RESOURCE_NOT_FOUND, _SESSION_NOT_FOUND)
    return Fate.DOUBTFUL if is_of_transport and _WORDS.search(searched) else None


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
