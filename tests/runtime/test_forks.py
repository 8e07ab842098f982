"""What code leaves in a process that its forks would share or lack is found."""

from __future__ import annotations

import ctypes
import json
import mmap
import multiprocessing
import os
import random
import secrets
import signal
import socket
import sqlite3
import subprocess
import tempfile
import threading
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from waiting import WAIT_SECONDS

from nekro.base.forks import ForkWatch, adopt_orphans, show_command_line, wait_until_orphaned
from nekro.broker import publishing

KEPT: list[Any] = []


def in_fork(work: Callable[[], Any]) -> Any:
    """Do something in a fork of this process, which has one thread; returns its result."""
    learn, tell = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=lambda: tell.send(work()))
    process.start()
    tell.close()
    try:
        assert learn.poll(WAIT_SECONDS)
        return learn.recv()
    finally:
        learn.close()
        process.kill()
        process.join()


def obstacles_of(work: Callable[[], Any]) -> list[str]:
    def watched() -> list[str]:
        with ForkWatch() as watch:
            KEPT.append(work())
        return watch.obstacles()

    found: list[str] = in_fork(watched)
    return found


def begin_thread() -> None:
    threading.Thread(target=threading.Event().wait, daemon=True).start()


def begin_process() -> Any:
    return subprocess.Popen(["sleep", "600"], preexec_fn=lambda: ctypes.CDLL(None).prctl(1, signal.SIGKILL))


OBSTACLES: dict[str, tuple[Callable[[], Any], str]] = {
    "a thread": (begin_thread, "a thread"),
    "a process": (begin_process, "a child process"),
    "a file": (lambda: os.open("/etc/hosts", os.O_RDONLY), "open files (/etc/hosts)"),
    "a socket": (socket.socket, "open files (socket:"),
    "a database": (lambda: sqlite3.connect("/etc/hosts"), "open files (/etc/hosts)"),
    "shared memory": (lambda: mmap.mmap(-1, 4096), "shared memory"),
    "a signal handler": (lambda: signal.signal(signal.SIGUSR1, lambda *_: None), "a signal handler"),
    "a timer": (lambda: signal.setitimer(signal.ITIMER_REAL, 1000), "a timer"),
    "a drawn number": (random.random, "random numbers"),
    "a seed": (lambda: random.seed(1), "random numbers"),
    "a generator": (random.Random, "a value of `seed`"),
    "a UUID": (uuid.uuid4, "a value of `urandom`"),
    "random bytes": (lambda: os.urandom(8), "a value of `urandom`"),
    "a token": (secrets.token_hex, "a value of `randbytes`"),
    "a secret choice": (lambda: secrets.choice("abc"), "a value of `getrandbits`"),
    "a process id": (lambda: os.getpid(), "a value of `getpid`"),
    "a temporary folder": (tempfile.TemporaryDirectory, "a value of"),
}


@pytest.mark.parametrize("kind", OBSTACLES)
def test_what_a_fork_would_share_or_lack_is_found(kind: str) -> None:
    work, expected = OBSTACLES[kind]
    assert any(obstacle.startswith(expected) for obstacle in obstacles_of(work))


def harmless() -> Any:
    """What imports do all the time."""
    thread = threading.Thread(target=lambda: None)
    thread.start()
    thread.join()
    subprocess.run(["true"], check=True)
    with open("/etc/hosts") as file, socket.socket(), sqlite3.connect(":memory:"):
        content = file.read()
    return content, random.Random(1), json.loads("[]"), threading.Lock()


def test_what_has_ended_and_what_is_seeded_is_no_obstacle() -> None:
    assert obstacles_of(harmless) == []


def test_the_watched_functions_are_restored() -> None:
    def work() -> list[bool]:
        before = os.getpid, os.urandom, random.Random.seed, random.SystemRandom.randbytes
        with ForkWatch():
            assert os.getpid is not before[0]
        after = os.getpid, os.urandom, random.Random.seed, random.SystemRandom.randbytes
        return [one is other for one, other in zip(before, after, strict=True)]

    assert in_fork(work) == [True] * 4


@pytest.mark.parametrize("adopts", [True, False])
def test_orphans_become_children_of_the_process_that_adopts_them(adopts: bool) -> None:
    def work() -> bool:
        adopt_orphans(adopts)
        learn, tell = os.pipe()
        between = os.fork()
        if between == 0:
            above = os.getpid()
            if os.fork() == 0:
                wait_until_orphaned(above)
                os.write(tell, str(os.getpid()).encode())
                signal.pause()
            os._exit(0)
        os.waitpid(between, 0)
        orphan = int(os.read(learn, 32))
        parent = int(Path(f"/proc/{orphan}/stat").read_text().rpartition(")")[2].split()[1])
        os.kill(orphan, signal.SIGKILL)
        return parent == os.getpid()

    assert in_fork(work) is adopts


def test_a_fork_is_listed_with_its_own_command_line() -> None:
    def work() -> bytes:
        show_command_line(["nekro", "worker"])
        return Path("/proc/self/cmdline").read_bytes().rstrip(b"\0")

    assert in_fork(work) == b"nekro\0worker"


def test_a_longer_command_line_is_cut_off() -> None:
    def work() -> tuple[int, int]:
        before = len(Path("/proc/self/cmdline").read_bytes())
        show_command_line(["x" * (1 << 16)])
        return before, len(Path("/proc/self/cmdline").read_bytes())

    before, after = in_fork(work)
    assert after <= before


def test_forks_publish_with_different_ids() -> None:
    first, second = (in_fork(lambda: next(publishing._unique)) for _ in range(2))
    assert first.rpartition(".")[0] != second.rpartition(".")[0]
