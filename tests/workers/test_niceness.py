"""Priority of lane ``long``: its session's share of processor time is lower while jobs run."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import pytest
from waiting import eventually

from workers.pools.thread_pool import SessionShare

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="sessions are grouped by Linux only")


class Share:
    """A share whose kernel file is a regular one; the process leads its session by default."""

    def __init__(self, path: Path, *, niceness: int = 5) -> None:
        path.touch()
        self.path = path
        self.is_busy = False
        self.asked = 0
        self._share = SessionShare(
            asyncio.get_running_loop(), niceness=niceness, is_busy=self._ask, path=path, settle_seconds=0
        )

    def _ask(self) -> bool:
        self.asked += 1
        return self.is_busy

    def set(self, *, is_busy: bool) -> None:
        self.is_busy = is_busy
        self._share.changed()

    async def becomes(self, text: str) -> None:
        await eventually(lambda: self.path.read_text() == text, what=text)

    async def settled(self) -> None:
        """Wait until a timer that was set before has run."""
        passed = asyncio.Event()
        asyncio.get_running_loop().call_later(0.01, passed.set)
        await passed.wait()


@pytest.fixture
def leads_session(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getsid", lambda pid: os.getpid())


@pytest.mark.usefixtures("leads_session")
async def test_the_share_is_lower_while_jobs_run_and_restored_afterwards(tmp_path: Path) -> None:
    share = Share(tmp_path / "autogroup")
    share.set(is_busy=True)
    await share.becomes("5")
    share.set(is_busy=False)
    await share.becomes("0")


@pytest.mark.usefixtures("leads_session")
async def test_a_short_job_does_not_change_the_share(tmp_path: Path) -> None:
    share = Share(tmp_path / "autogroup")
    share.set(is_busy=True)
    share.set(is_busy=False)
    await share.settled()
    assert (share.asked, share.path.read_text()) == (1, "")


@pytest.mark.usefixtures("leads_session")
async def test_a_write_that_comes_too_soon_is_retried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, refused = os.write, [BlockingIOError(), BlockingIOError()]

    def sometimes(descriptor: int, data: bytes) -> int:
        if data == b"5" and refused:
            raise refused.pop()
        return write(descriptor, data)

    monkeypatch.setattr(os, "write", sometimes)
    share = Share(tmp_path / "autogroup")
    share.set(is_busy=True)
    await share.becomes("5")
    assert refused == []


@pytest.mark.usefixtures("leads_session")
async def test_without_session_groups_it_is_tried_once(tmp_path: Path) -> None:
    share = Share(tmp_path / "autogroup")
    share.path.unlink()
    for _ in range(2):
        share.set(is_busy=True)
        await share.settled()
    assert share.asked == 1 and not share.path.exists()


async def test_the_share_of_a_foreign_session_is_unchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "getsid", lambda pid: os.getpid() + 1)
    share = Share(tmp_path / "autogroup")
    share.set(is_busy=True)
    await share.settled()
    assert share.asked == 0 and share.path.read_text() == ""
