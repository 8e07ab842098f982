"""Programs of fifty calls in real workers, which are killed or stopped at random points of them."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fleet_probes import ask
from scene_model import HANG, SceneModel
from waiting import eventually
from worker_fleet import Fleet, Worker

from nekro.app import use_cases
from nekro.app.services import Services
from nekro.sandbox.models import StopType
from nekro_agent.layout import UNDO_NAME
from storage.repositories.rounds import Round
from storage.states import FINAL_ROUND_STATES

#: What it reads of clocks and chance is in the arguments of its calls, so the effect log has it.
PROGRAM = """
import os, random, threading, time, uuid
from datetime import datetime
frame = {"first": [], "second": []}
def append(line):
    with open("/app/shared/log.txt", "a") as log: log.write(line)
append("begun\\n")
for number in range(8):
    frame["first"].append(tick(f"{_ck} first {number} {random.random()} {time.time_ns()}"))
    append(f"{number}\\n")
    print(keep(f"{_ck} kept {number} {uuid.uuid4()} {datetime.now()}"))
    with open("/app/shared/new.txt", "w") as new: new.write(f"state {number} {time.monotonic()}")
    os.replace("/app/shared/new.txt", "/app/shared/state.txt")
    state = open("/app/shared/state.txt").read()
    frame["second"].append(tick(f"{_ck} second {number} {os.urandom(4).hex()} {state}"))
found = {part: [] for part in range(4)}
def work(part):
    for number in range(3):
        found[part].append(tick(f"{_ck} thread {part}.{number}"))
threads = [threading.Thread(target=work, args=(part,)) for part in found]
for thread in threads: thread.start()
for thread in threads: thread.join()
same = [tick(f"{_ck} same") for _ in range(3)]
print(found, same)
os.rename("/app/shared/log.txt", "/app/shared/renamed.txt")
for number in range(10):
    print(number, len(frame["first"]), tick(f"{_ck} last {number} {time.time()}"))
print(frame, os.listdir("/app/shared"))
look(f"{_ck} end")
"""
CALLS = 50
SAY = 'send_msg_text(_ck, "done")'

#: Ends or stops a worker; the lane of the worker.
Fault = Callable[[Worker], object]


def effects(fleet: Fleet) -> list[str]:
    """Lines of the effect log, which is a file that no part of the system knows."""
    path = fleet.settings.data_dir / "plugins" / "tests.scene" / "journal.txt"
    return path.read_text().split("\n")[:-1] if path.exists() else []


def expected_of(chat_key: str, log: Sequence[str]) -> tuple[str, dict[str, str]]:
    """What a program prints, and the files that it leaves, if it made each effect of the log once."""

    def one(effect: str) -> str:
        (line,) = {line for line in log if line.startswith(f"{effect} ")}
        return line.partition(" ")[2]

    first = [one(f"tick {chat_key} first {number}") for number in range(8)]
    second = [one(f"tick {chat_key} second {number}") for number in range(8)]
    found = {part: [f"{chat_key} thread {part}.{number}" for number in range(3)] for part in range(4)}
    lines = [
        *(f"kept {one(f'keep {chat_key} kept {number}')}" for number in range(8)),
        f"{found} {[f'{chat_key} same'] * 3}",
        *(f"{number} 8 {one(f'tick {chat_key} last {number}')}" for number in range(10)),
        f"{ {'first': first, 'second': second} } {['renamed.txt', 'state.txt']}",
    ]
    files = {"renamed.txt": "\n".join(["begun", *"01234567", ""]), "state.txt": second[-1].split(" ", 4)[4]}
    return "\n".join([*lines, ""]), files


@dataclass
class Survivors:
    """Plays programs in a fleet whose workers end."""

    fleet: Fleet
    model: SceneModel
    services: Services
    #: Whether methods workers die: a TOOL call may run again, and the outcome of another may be unknown.
    tools_repeat: bool = False
    #: Programs that were interrupted, by how often.
    interrupted: Counter[int] = field(default_factory=Counter)
    played: int = 0
    #: One worker ends at a time: there is always another one that can.
    _ending: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def play(self, count: int, *faults: tuple[str, Fault, float]) -> None:
        """Play programs at once, each in a chat, while workers end, and check what each did.

        Args:
            faults: the lane of a worker, what ends it, and the point: the fraction of all effects.
        """
        chats = [f"p{self.played + number}" for number in range(count)]
        self.played += count
        before = len(effects(self.fleet))
        for chat_key in chats:
            await self.say(chat_key, HANG, PROGRAM)
        asked = self.model.asked
        await eventually(lambda: all(asked[one] for one in chats), what=self.fleet.waiting_for("requests"))
        for chat_key in chats:
            self.model.scenes[chat_key] = [SAY]
            self.model.release(chat_key)
        await eventually(lambda: self._all_run(chats), what=self.fleet.waiting_for("answers"))
        starts = [
            asyncio.create_task(self._disturb(lane, fault, before + int(point * count * CALLS)))
            for lane, fault, point in faults
        ]
        for chat_key in chats:
            await self._check(chat_key)
        await asyncio.gather(*starts)
        repeated = self.repeated()
        assert all(line.startswith("tick ") for line in repeated) if self.tools_repeat else not repeated

    async def say(self, chat_key: str, *answers: str) -> None:
        """Begin a turn in which the model gives these answers."""
        self.model.scenes[chat_key] = list(answers)
        await use_cases.receive_message(
            self.services, chat_key, f"scene:{chat_key}", user_id="ada", user_name="Ada"
        )

    async def _all_run(self, chats: Sequence[str]) -> bool:
        rows = await ask(self.services.database, "SELECT chat_key FROM rounds WHERE answered_at IS NOT NULL")
        return set(chats) <= {chat_key for (chat_key,) in rows}

    async def _disturb(self, lane: str, fault: Fault, after: int) -> None:
        """End a worker of a lane after so many effects, and start another."""
        while len(effects(self.fleet)) < after:
            await asyncio.sleep(0.002)
        await asyncio.sleep(random.random() * 0.02)
        await self.disturb(lane, fault)

    async def disturb(self, lane: str, fault: Fault) -> None:
        """End a worker of a lane, and start another."""
        async with self._ending:
            worker = random.choice(self.running(lane))
            fault(worker)
            self.fleet.workers.remove(worker)
            await asyncio.to_thread(self.fleet.start, lane)

    def running(self, lane: str) -> list[Worker]:
        """The workers of a lane."""
        return [one for one in self.fleet.workers if one.lane == lane and one.process.poll() is None]

    async def rounds(self, chat_key: str, *, count: int = 1) -> list[Round]:
        """Wait until a chat has so many rounds, or more, and none is open."""

        async def look() -> list[Round]:
            async with self.services.database.read() as tx:
                found = await tx.rounds.newest(chat_key, limit=50)
            is_over = all(one.state in FINAL_ROUND_STATES for one in found)
            return found if is_over and len(found) >= count else []

        found: list[Round] = await eventually(look, what=self.fleet.waiting_for(f"the rounds of {chat_key}"))
        return found

    async def _check(self, chat_key: str) -> None:
        first, *others = await self.rounds(chat_key, count=2)
        if self.tools_repeat and "OutcomeUnknownError" in f"{first.error} {first.output}":
            return
        assert len(others) == 1, (first, *others, self.fleet.logs())
        (second,) = others
        stops = (first.stop_type, second.stop_type)
        assert stops == (StopType.AGENT, StopType.NORMAL), (first, second, self.fleet.logs())
        self.interrupted[first.attempt - 1] += 1
        # The model was asked for the program once, and for the words after it by each worker that began them.
        assert 2 <= self.model.asked[chat_key] <= 1 + second.attempt, (first, second)
        assert len(first.calls or []) == CALLS
        output, files = expected_of(chat_key, effects(self.fleet))
        assert first.output == output
        assert await self.files(chat_key) == files

    async def files(self, chat_key: str) -> dict[str, str]:
        """The files that the programs of a chat left.

        What was saved for another attempt stays if the worker ends right after it has recorded the round.
        """
        root = await self.shared_dir(chat_key)
        found = {one.relative_to(root): one for one in root.rglob("*") if one.is_file()}
        return {str(path): one.read_text() for path, one in found.items() if path.parts[0] != UNDO_NAME}

    async def shared_dir(self, chat_key: str) -> Path:
        """The directory of these files."""
        async with self.services.database.read() as tx:
            chat = await tx.chats.get(chat_key)
        return Path(self.services.areas.shared_dir(chat.container_key))

    @property
    def interruptions(self) -> int:
        """How often programs were interrupted."""
        return sum(times * programs for times, programs in self.interrupted.items())

    def repeated(self) -> dict[str, int]:
        """Effects that happened more often than their programs asked for."""
        counts = Counter(effects(self.fleet))
        return {line: n for line, n in counts.items() if n != (3 if line.endswith(" same") else 1)}


def descendants(pid: int) -> set[int]:
    """Processes below one, including its sandboxes."""
    found: set[int] = set()
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in task.read_text().split():
                found |= {int(child)} | descendants(int(child))
    return found
