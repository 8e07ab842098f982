"""Error replies of Redis as exception classes, the same for every server version.

Redis 7 returns what a command inside a script met as it is: ``OOM command not allowed …``. Redis
6.2 wraps it: ``ERR Error running script (call to f_…): @user_script:2: @user_script: 2: -OOM …``.
The code (``OOM``) is part of the protocol in both; the sentences around it are not, and differ
between versions and compatible servers.
"""

from __future__ import annotations

import re
from typing import Final

import redis
from redis._parsers.base import BaseParser

__all__ = ["NotPrimaryError", "WritesRefusedError", "error_of_reply", "unwrapped"]

#: The error line of a command inside a script, within what Redis 6.2 says of the script.
_WRAPPED: Final = re.compile(r"@user_script: ?\d+: -(?P<line>[A-Z][A-Z0-9]* .*)", re.DOTALL)
#: A replica: by its own word, while it has lost its primary, or when it was demoted during a BLMOVE.
_NOT_PRIMARY: Final = frozenset({"READONLY", "MASTERDOWN", "TRYAGAIN", "UNBLOCKED"})
#: A primary that takes no writes now: its disk is full, or too few replicas follow.
_WRITES_REFUSED: Final = frozenset({"MISCONF", "NOREPLICAS"})


class NotPrimaryError(redis.ConnectionError):
    """The server at the other end takes no writes (any more): another one is, or becomes, the primary.

    A connection error: the next connection may lead to that one.
    """


class WritesRefusedError(redis.ResponseError):
    """The primary takes no writes for a while; nothing was executed."""


def error_of_reply(line: str) -> redis.RedisError:
    """Return the exception for an error line of the protocol, by its code.

    Args:
        line: without the leading ``-``. A command's error that a script passed on counts as the
            command's own.
    """
    wrapped = _WRAPPED.search(line)
    line = wrapped["line"] if wrapped else line
    code = line.partition(" ")[0]
    if code in _NOT_PRIMARY:
        return NotPrimaryError(line)
    if code in _WRITES_REFUSED:
        return WritesRefusedError(line)
    error: redis.RedisError = BaseParser.parse_error(line)  # type: ignore[no-untyped-call]
    return error


def unwrapped(error: redis.ResponseError) -> redis.RedisError:
    """Return what ``error_of_reply`` makes of a reply that redis-py raised; ``error`` itself if the same."""
    code, text = getattr(error, "status_code", None), str(error)
    found = error_of_reply(f"{code} {text}" if code else text)
    return error if type(found) in (type(error), redis.ResponseError) else found
