"""Converts error replies of Redis to exceptions, independently of the server version.

Redis 7 returns the error of a command inside a script unchanged: ``OOM command not allowed …``. Redis
6.2 wraps it: ``ERR Error running script (call to f_…): @user_script:2: @user_script: 2: -OOM …``.
The code (``OOM``) is part of the protocol in both; the surrounding text is not, and differs
between versions and compatible servers.
"""

from __future__ import annotations

import re
from typing import Final

import redis
from redis._parsers.base import BaseParser

__all__ = ["NotPrimaryError", "WritesRefusedError", "error_of_reply", "unwrapped"]

#: The error line of a command inside a script, within the script error of Redis 6.2.
_WRAPPED: Final = re.compile(r"@user_script: ?\d+: -(?P<line>[A-Z][A-Z0-9]* .*)", re.DOTALL)
#: Codes of a replica: refuses writes, has lost its primary, or was demoted during a BLMOVE.
_NOT_PRIMARY: Final = frozenset({"READONLY", "MASTERDOWN", "TRYAGAIN", "UNBLOCKED"})
#: Codes of a primary that temporarily refuses writes: its disk is full, or it has too few replicas.
_WRITES_REFUSED: Final = frozenset({"MISCONF", "NOREPLICAS"})


class NotPrimaryError(redis.ConnectionError):
    """The server does not accept writes, because another one is, or is about to become, the primary.

    It is a connection error, because the next connection may reach the primary.
    """


class WritesRefusedError(redis.ResponseError):
    """The primary temporarily refuses writes; nothing was executed."""


def error_of_reply(line: str) -> redis.RedisError:
    """Return the exception for an error line of the protocol, by its code.

    Args:
        line: without the leading ``-``. The error of a command inside a script is treated as the
            command's own error.
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
    """Return ``error_of_reply`` for an error of redis-py; ``error`` itself if the class is the same."""
    code, text = getattr(error, "status_code", None), str(error)
    found = error_of_reply(f"{code} {text}" if code else text)
    return error if type(found) in (type(error), redis.ResponseError) else found
