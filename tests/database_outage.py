"""Outages of a test's database, the same for both kinds."""

from __future__ import annotations

import sqlite3

from cut_proxy import CutProxy
from sqlalchemy import make_url


class DatabaseOutage:
    """Makes a database unreachable: holds SQLite's write lock, or cuts off PostgreSQL."""

    def __init__(self, url: str, proxy: CutProxy | None) -> None:
        """Create it, without an outage.

        Args:
            url: URL of the database.
            proxy: the proxy in front of PostgreSQL; None for SQLite.
        """
        self._file = make_url(url).database
        self._proxy = proxy
        self._lock: sqlite3.Connection | None = None

    def go_away(self) -> None:
        """Begin an outage."""
        if self._proxy is not None:
            self._proxy.go_away()
            return
        assert self._file is not None
        self._lock = sqlite3.connect(self._file, isolation_level=None)
        self._lock.execute("BEGIN EXCLUSIVE")

    def come_back(self) -> None:
        """End the outage; a no-op without one."""
        if self._proxy is not None:
            self._proxy.come_back()
        if self._lock is not None:
            self._lock.execute("ROLLBACK")
            self._lock.close()
            self._lock = None
