"""Error replies of Redis as exception classes, the same for every server version.

Redis 7 returns what a command inside a script met as it is: ``OOM command not allowed …``. Redis
6.2 wraps it: ``ERR Error running script (call to f_…): @user_script:2: @user_script: 2: -OOM …``.
The code (``OOM``) is part of the protocol in both; the sentences around it are not, and differ
between versions and compatible servers.
"""

from __future__ import annotations

import re
from typing import Final

from redis._parsers.base import BaseParser
from redis.exceptions import RedisError

__all__ = ["error_of_reply", "unwrapped"]

#: The error line of a command inside a script, within what Redis 6.2 says of the script.
_WRAPPED: Final = re.compile(r"@user_script: ?\d+: -(?P<line>[A-Z][A-Z0-9]* .*)", re.DOTALL)


def error_of_reply(line: str) -> RedisError:
    """Return the exception for an error line of the protocol, by its code.

    Args:
        line: without the leading ``-``. A command's error that a script passed on counts as the
            command's own.
    """
    wrapped = _WRAPPED.search(line)
    error: RedisError = BaseParser.parse_error(wrapped["line"] if wrapped else line)  # type: ignore[no-untyped-call]
    return error


def unwrapped(error: RedisError) -> RedisError:
    """Return the error of the command inside a script that redis-py executed; ``error`` itself if none is."""
    wrapped = _WRAPPED.search(str(error))
    return error_of_reply(wrapped["line"]) if wrapped else error
