"""Which Redis is the primary: error replies that say so, and what this process knows of each address.

Error replies become exceptions independently of the server version. Redis 7 returns the error of a command
inside a script unchanged: ``OOM command not allowed …``. Redis 6.2 wraps it: ``ERR Error running script
(call to f_…): @user_script:2: @user_script: 2: -OOM …``. The code (``OOM``) is part of the protocol in
both; the surrounding text is not, and differs between versions and compatible servers.

All connections to one address share what the process knows of its primary. A connection that answers may
lead to the wrong server. A primary that was frozen or cut off and was replaced meanwhile accepts commands
again, for about 10 s, until the Sentinels demote it; a replica answers reads and keeps subscriptions. What
is written there is lost. So each connection has a *term*, which ends as soon as this process learns that
another server is the primary; a connection of an earlier term is replaced before its next use, which costs
no request:

- Behind Sentinel a thread asks all Sentinels once a second.
- A server that is met for the first time began after the others, or took their address over.
- A server that says that it is a replica is not the primary any more.
"""

from __future__ import annotations

from broker_config.redis_library import redis

# isort: split
import os
import re
import threading
import time
import weakref
from collections.abc import Callable, Hashable
from typing import Any, Final

from loguru import logger
from redis._parsers.base import BaseParser

from nekro_agent.durations import FRESH_SECONDS

__all__ = [
    "Address",
    "NotPrimaryError",
    "Primary",
    "Sentinels",
    "WritesRefusedError",
    "error_of_reply",
    "unwrapped",
]

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


#: Host and port.
Address = tuple[str, int]

#: How long a Sentinel that did not answer is not asked by the thread: a dead host costs a full timeout.
SKIP_SECONDS: Final = 10.0


class Primary:
    """The primary of one address; thread-safe. ``Primary.of`` returns the one of this process."""

    def __init__(self, sentinels: Sentinels | None) -> None:
        self.sentinels = sentinels
        #: How often another server became the primary, as far as this process has learned.
        self.term = 0
        self._lock = threading.Lock()
        self._runs: set[str] = set()
        #: A server was last met in this term.
        self._met_term = -1
        self._callbacks: list[weakref.WeakMethod[Callable[[], None]]] = []

    @classmethod
    def of(cls, key: Hashable, make_sentinels: Callable[[], Sentinels | None]) -> Primary:
        """Return what this process knows about an address.

        Args:
            key: identifies the address and the way to reach it.
        """
        with _known_lock:
            # By process id, because a forked process has no thread that asks Sentinels.
            found = _known.get((os.getpid(), key))
            if found is None:
                found = _known[os.getpid(), key] = cls(make_sentinels())
                if found.sentinels is not None:
                    found.sentinels.watch(found)
            return found

    def on_change(self, callback: Callable[[], None]) -> None:
        """Call a method on any thread when another server is the primary; it must not block.

        Args:
            callback: a bound method; the reference is weak.
        """
        with self._lock:
            self._callbacks.append(weakref.WeakMethod(callback))

    def met(self, info: dict[str, str], term: int) -> int:
        """Record which server a new connection reached; returns the term of the connection.

        Args:
            info: what the server says about itself (``INFO``); empty if it may not be asked.
            term: the term when the connection was begun.

        Raises:
            NotPrimaryError: it is a replica.
        """
        role, run = info.get("role", "master"), info.get("run_id")
        if role != "master":
            kind = "a replica" if role == "slave" else f"no primary (role {role})"
            raise NotPrimaryError(f"the server is {kind}; connect to its primary")
        if not run:
            return term
        with self._lock:
            # A proxy may lead to several servers in turn; each of them is new once.
            is_other = run not in self._runs and self._met_term == term
            self._runs.add(run)
            self._met_term = max(self._met_term, term)
        if is_other:
            self.left(term)
        return term + is_other

    def left(self, term: int) -> None:
        """End a term, unless it has ended: the server of its connections is not the primary any more."""
        with self._lock:
            if term != self.term:
                return
            self.term += 1
            self._callbacks = [known for known in self._callbacks if known() is not None]
            callbacks = [callback for known in self._callbacks if (callback := known()) is not None]
        logger.bind(term=self.term).warning("redis_primary_changed")
        for callback in callbacks:
            callback()


_known: weakref.WeakValueDictionary[Hashable, Primary] = weakref.WeakValueDictionary()

_known_lock = threading.Lock()


class Sentinels:
    """The Sentinels of one primary; thread-safe."""

    def __init__(
        self, master: str, addresses: tuple[Address, ...], connect: Callable[[Address], redis.Redis]
    ) -> None:
        """Ask nothing yet.

        Args:
            master: name of the primary in the configuration of the Sentinels.
            connect: returns a client of one Sentinel.
        """
        self.master = master
        self._clients = {address: connect(address) for address in addresses}
        #: Those that answered last are asked first.
        self._addresses = addresses
        #: Number of the newest known failover, and the primary that it chose.
        self._newest: tuple[int, Address] | None = None
        self._skipped_until: dict[Address, float] = {}

    def primary(self) -> Address:
        """Ask the Sentinels in turn for the primary's address; blocks.

        Raises:
            redis.ConnectionError: no Sentinel reports a reachable primary.
        """
        refusals = []
        for address in self._addresses:
            try:
                found = self._ask(address, must_be_up=True)
            except redis.AuthenticationError as exc:
                refusals.append(f"{address[0]}:{address[1]}: {exc} (NEKRO_BROKER__SENTINEL_PASSWORD)")
                continue
            except (redis.RedisError, OSError) as exc:
                refusals.append(f"{address[0]}:{address[1]}: {exc}")
                continue
            # Query the one that answered first the next time, because a dead host costs a full timeout.
            self._addresses = (address, *(other for other in self._addresses if other != address))
            if self._newest is None:
                self._newest = found
            # This Sentinel may not have heard yet of the newest failover.
            return max(found, self._newest)[1]
        raise redis.ConnectionError(
            f"no Sentinel reports a primary {self.master!r} (NEKRO_BROKER__SENTINEL_MASTER): "
            + "; ".join(refusals)
        )

    def watch(self, primary: Primary) -> None:
        """Ask for the primary once a second, until it is not referenced any more."""
        thread = threading.Thread(
            target=_watch, args=(weakref.ref(primary),), name="nekro-sentinels", daemon=True
        )
        thread.start()

    def has_moved(self) -> bool:
        """Ask every Sentinel that answers; returns whether another server is the primary than before."""
        answers = []
        for address in self._addresses:
            if time.monotonic() < self._skipped_until.get(address, 0.0):
                continue
            try:
                answers.append(self._ask(address))
            except (redis.RedisError, OSError):
                self._skipped_until[address] = time.monotonic() + SKIP_SECONDS
        if not answers:
            return False
        before, self._newest = self._newest, max(answers)
        return before is not None and before[1] != self._newest[1]

    def _ask(self, address: Address, *, must_be_up: bool = False) -> tuple[int, Address]:
        """Return the number of the newest failover that a Sentinel knows, and the primary that it chose."""
        client = self._clients[address]
        # During a failover this names the promoted replica before the state does.
        named: Any = client.sentinel_get_master_addr_by_name(self.master)
        state: Any = client.sentinel_master(self.master)
        found = str(state["ip"]), int(state["port"])
        chosen = found if named is None else (named[0].decode(), int(named[1]))
        is_down = state["is_sdown"] or state["is_odown"] or not state["is_master"]
        if must_be_up and is_down and chosen == found:
            raise redis.ConnectionError("the primary is down and no other was promoted yet")
        return int(state["config-epoch"]), chosen


def _watch(of: weakref.ref[Primary]) -> None:
    while True:
        time.sleep(FRESH_SECONDS)
        primary = of()
        if primary is None or primary.sentinels is None:
            return
        term = primary.term
        try:
            if primary.sentinels.has_moved():
                primary.left(term)
        except Exception:  # connections to a replaced primary depend on this thread
            logger.exception("sentinels_not_asked")
        del primary
