"""A program that is killed in a call and run again ends as if nothing had happened, or says that it cannot.

Each program draws, reads clocks or changes files in its own way. It is killed in its first
call, and in its last.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import secrets
import stat

import pytest
from sandbox_lab import Lab

from nekro.sandbox.models import NOT_RESUMABLE, RunResult, StubCall, StubResult
from nekro.sandbox.packages.base import read_base
from nekro.sandbox.undo import NotUndoneError
from nekro_agent.layout import UNDO_NAME

SEED = secrets.token_hex(32)

#: Those that import packages of the base layer.
OF_PACKAGES = ("figures", "numpy files", "sampling")
#: Programs that end the same: the outputs, the calls and the files of an undisturbed run.
SAME = {
    "scandir": """
import os
for name in ("z", "b", "a"): open(name, "w").close()
with os.scandir() as entries:
    for entry in entries: echo(entry.name); open(entry.name, "a").write(entry.name)
""",
    "walk": """
import glob, os, pathlib
for name in ("b/y/2", "b/y/1", "a/x/3"):
    pathlib.Path(name).parent.mkdir(parents=True, exist_ok=True)
    pathlib.Path(name).write_text(name)
echo(list(os.walk(".")))
echo([str(path) for path in pathlib.Path().rglob("*")])
for path in glob.iglob("**/*", recursive=True):
    if os.path.isfile(path): echo(path); os.rename(path, path + ".done")
""",
    "sampling": """
import numpy as np, pandas as pd
frame = pd.DataFrame({"x": range(100)})
echo(frame.sample(5).x.tolist())
echo(float(np.random.default_rng().normal()), np.random.choice(100, 3).tolist())
frame.sample(frac=0.5).to_csv("half.csv", mode="a")
echo(np.random.permutation(9).tolist())
frame.sample(3).to_excel("three.xlsx") if 0 else frame.sample(3).to_json("three.json")
echo(np.random.RandomState().randint(1 << 30))
""",
    "random": """
import random, secrets, os, uuid, tempfile
echo(random.random(), secrets.token_hex(), os.urandom(4), str(uuid.uuid4()))
values = list(range(50)); random.shuffle(values)
echo(values, random.gauss(0, 1), random.SystemRandom().random(), tempfile.mktemp())
with tempfile.NamedTemporaryFile(dir=".", delete=False) as file: file.write(b"x")
echo(os.path.basename(file.name), uuid.uuid5(uuid.NAMESPACE_DNS, "x").hex)
""",
    "hashes": """
words = {f"word {number}" for number in range(50)}
echo(list(words)[:5], hash("x"), hash((1, "y")))
for word in list(words)[:3]: echo(word); open("log", "a").write(word)
""",
    "asyncio": """
import asyncio, random
async def work(number):
    await asyncio.sleep(random.random() / 1000)
    open("log", "a").write(f"{number} ")
    return random.random()
async def main():
    for turn in range(3):
        echo(sum([await work(number) for number in range(5)]))
asyncio.run(main())
""",
    "sqlite": """
import sqlite3
base = sqlite3.connect("data.db")
base.execute("create table if not exists numbers (x)")
for number in range(4):
    base.execute("insert into numbers values (?)", (number,)); base.commit()
    echo(base.execute("select count(*), random() is null from numbers").fetchall())
base.close()
""",
    "sqlite uri": """
import os, sqlite3
base = sqlite3.connect(f"file://localhost{os.getcwd()}/data.db?mode=rwc", uri=True)
base.execute("create table if not exists numbers (x)")
for number in range(3):
    base.execute("insert into numbers values (?)", (number,)); base.commit()
    echo(base.execute("select count(*) from numbers").fetchall())
base.close()
""",
    "sqlite attached": """
import sqlite3
base = sqlite3.connect(":memory:")
base.execute("attach 'other.db' as other")
base.execute("create table if not exists other.numbers (x)")
for number in range(3):
    base.execute("insert into other.numbers values (?)", (number,)); base.commit()
    echo(base.execute("select count(*) from other.numbers").fetchall())
base.close()
""",
    "sqlite vacuum": """
import os, sqlite3
base = sqlite3.connect(":memory:")
base.execute("create table numbers (x)"); base.commit()
echo(os.path.exists("copy.db"))
base.execute("vacuum into 'copy.db'")
echo(os.path.exists("copy.db"))
base.close()
""",
    "figures": """
import matplotlib.pyplot as plt
from PIL import Image
for number in range(2):
    plt.figure(); plt.plot([number, 2]); plt.savefig("plot.png", metadata={"Software": None}); plt.close()
    echo(open("plot.png", "rb").read()[:8])
    Image.new("RGB", (4, 4), (number, 0, 0)).save("picture.png")
    echo(number)
    Image.open("picture.png").rotate(90).save("picture.png")
""",
    "in place": """
import mmap, os
with open("data", "wb") as file: file.write(bytes(100_000))
echo(1)
with open("data", "r+b") as file:
    file.seek(10); file.write(b"ten"); file.truncate(90_000)
echo(2)
with open("data", "r+b") as file, mmap.mmap(file.fileno(), 0) as view:
    view[20:23] = bytes([view[20] + 1, view[21] + 1, view[22] + 1])
echo(3)
with open("data", "a+b") as file, mmap.mmap(file.fileno(), 0) as view:
    view[20:23] = bytes([view[20] + 1, view[21] + 1, view[22] + 1])
echo(4)
os.truncate("data", 50)
echo(open("data", "rb").read())
""",
    "append in place": """
import mmap
echo(1)
with open("large", "a+b") as file, mmap.mmap(file.fileno(), 0) as view:
    view[0] += 1
echo(2)
with open("large", "rb") as file: echo(file.read(4))
""",
    "numpy files": """
import numpy as np
values = np.memmap("map", dtype="u1", mode="w+", shape=(100_000,))
values[5] = 5; values.flush()
echo(int(values[5]))
again = np.memmap("map", dtype="u1", mode="r+", shape=(100_000,))
again[5] += 1; again.flush()
echo(int(again[5]))
np.arange(5).tofile("raw"); np.save("saved", np.arange(5)); np.savez_compressed("z", a=np.arange(3))
echo(2)
""",
    "trees": """
import os, shutil
os.makedirs("tree/a/b", exist_ok=True)
for name in ("tree/1", "tree/a/2", "tree/a/b/3"): open(name, "w").write(name)
echo(1)
shutil.copytree("tree", "copy")
echo(2)
shutil.rmtree("tree")
echo(os.path.exists("tree"))
shutil.move("copy", "moved"); os.replace("moved/1", "moved/a/2")
echo(sorted(os.listdir("moved/a")))
""",
    "descriptors": """
import os
directory = os.open(".", os.O_RDONLY)
os.makedirs("d", exist_ok=True)
inner = os.open("d", os.O_RDONLY)
echo(1)
file = os.open("x", os.O_WRONLY | os.O_CREAT | os.O_APPEND, dir_fd=inner)
os.write(file, b"more"); os.close(file)
echo(os.stat("d/x").st_size)
os.rename("x", "y", src_dir_fd=inner, dst_dir_fd=directory)
echo(os.listdir("."))
os.mkdir("m", dir_fd=inner); os.unlink("y", dir_fd=directory)
echo(os.listdir("d"))
""",
    "link that becomes a directory": """
import os
os.mkdir("real")
os.symlink("real", "d")
open("d/x", "w").close()
echo(sorted(os.listdir("real")))
os.remove("d"); os.mkdir("d")
open("d/x", "a").write("new")
echo(open("d/x").read())
""",
    "odd names": """
import os
name = os.fsdecode(b"raw \\xff \\n name")
for number in range(3):
    open(name, "a").write("x"); open("ü" * 100, "a").write("y"); open(b"bytes", "ab").write(b"z")
    echo(os.stat(name).st_size, os.stat("ü" * 100).st_size, os.stat("bytes").st_size)
""",
    "forks": """
import multiprocessing, os, random
context = multiprocessing.get_context("fork")
def work(number):
    open(f"{number}.txt", "a").write(str(random.random()))
for number in range(2):
    one = context.Process(target=work, args=(number,)); one.start(); one.join()
    echo(open(f"{number}.txt").read())
""",
    "texts and pickles": """
import csv, json, pickle
for number in range(3):
    with open("state.json", "a+") as file: json.dump(number, file)
    with open("values", "ab") as file: pickle.dump({number: "x"}, file)
    with open("table.csv", "a", newline="") as file: csv.writer(file).writerow([number, {1, "a"}])
    echo(open("table.csv").read().count("a"))
""",
    "permissions": """
import os
open("x", "w").write("secret")
os.chmod("x", 0o640)
echo(oct(os.stat("x").st_mode))
os.chmod("x", 0o600); os.mkdir("d", 0o750); os.chmod("d", 0o700)
echo(oct(os.stat("d").st_mode))
fd = os.open("x", os.O_RDONLY); os.fchmod(fd, 0o644)
echo(oct(os.stat("x").st_mode))
""",
    "replaced while open": """
import os
file = open("log", "a")
for number in range(3):
    file.write(f"{number}\\n"); file.flush()
    echo(number)
    os.replace("log", f"log.{number}"); file.close(); file = open("log", "a")
file.close()
echo(sorted(os.listdir()))
""",
    "compressed": """
import bz2, gzip, lzma, tarfile, zipfile
for number in range(2):
    with gzip.GzipFile("x.gz", "ab", mtime=0) as file: file.write(b"more")
    with zipfile.ZipFile("x.zip", "a") as file: file.writestr(zipfile.ZipInfo(f"{number}"), "x")
    with tarfile.open("x.tar", "a") as file: file.addfile(tarfile.TarInfo(f"{number}"))
    echo(len(gzip.open("x.gz").read()), zipfile.ZipFile("x.zip").namelist())
""",
}

#: Programs whose files are not followed; they say so before they are run again.
TOLD = {
    "escaped": """
import sqlite3
echo(1)
sqlite3.connect("file:data%20x.db", uri=True).execute("create table numbers (x)")
echo(2)
""",
    "attached by an expression": """
import sqlite3
echo(1)
sqlite3.connect(":memory:").execute("attach 'da' || 'ta' as other").execute("create table other.numbers (x)")
echo(2)
""",
    "spawned": """
import multiprocessing
echo(1)
multiprocessing.get_context("spawn").Pool(1).apply(print, ("x",))
""",
    "dbm": """
import dbm
echo(1)
dbm.open("base", "c").close()
echo(2)
""",
    "own library": """
import ctypes
echo(1)
libc = ctypes.CDLL("libc.so.6")
file = libc.open(b"x", 65, 0o600)
echo(2)
""",
    "own interpreter's library": """
import ctypes
echo(1)
libc = ctypes.CDLL(None)
file = libc.open(b"x", 65, 0o600)
echo(2)
""",
    "subprocess": """
import subprocess
echo(1)
subprocess.run(["touch", "x"])
echo(2)
""",
    "posix": """
import os
echo(1)
os.posix_spawn("/bin/touch", ["touch", "x"], {})
os.wait()
echo(2)
""",
}


class Attempts:
    """Runs one program until a call kills it, and then again."""

    def __init__(self, box: Lab, chat_key: str) -> None:
        self.box, self.chat_key = box, chat_key
        self.readings: list[str] = []
        self.calls: list[bytes] = []
        self.output = ""
        root = box.shared(chat_key)
        with (root / "large").open("wb") as file:
            file.write(b"x" * 100_000)
        (root / "large").chmod(0o666)

    async def run(self, code: str, *, kill: int = 0) -> RunResult | None:
        """Run it; None if it was killed in its call of that number, from 1."""
        self.calls, self.output, reached = [], "", asyncio.Event()
        already = len(self.readings)

        async def dispatch(call: StubCall) -> StubResult:
            self.calls.append(call.arguments)
            if call.readings:
                self.readings.append(call.readings)
            if len(self.calls) == kill:
                reached.set()
                await asyncio.Event().wait()
            return await self.box.dispatch(call)

        def printed(text: str) -> None:
            self.output += text

        repeated = ",".join(self.readings[:already])
        running = asyncio.ensure_future(
            self.box.run(
                code,
                chat_key=self.chat_key,
                seed=SEED,
                readings="" if NOT_RESUMABLE in self.readings else repeated,
                program_id="program",
                dispatch=dispatch,
                on_output=printed,
            )
        )
        killing = asyncio.ensure_future(reached.wait())
        await asyncio.wait((running, killing), return_when=asyncio.FIRST_COMPLETED)
        killing.cancel()
        if not reached.is_set():
            return await running
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running
        return None

    def files(self) -> dict[str, tuple[int, str]]:
        """Describe the files: the mode and the content of each."""
        found, root = {}, self.box.shared(self.chat_key)
        for path in root.rglob("*"):
            name = os.fsencode(path.relative_to(root)).decode("ascii", "backslashreplace")
            if name.partition("/")[0] == UNDO_NAME:
                continue
            info = path.lstat()
            content = ""
            if stat.S_ISREG(info.st_mode):
                content = hashlib.sha256(path.read_bytes()).hexdigest()
            elif stat.S_ISLNK(info.st_mode):
                content = os.readlink(path)
            found[name] = (info.st_mode, content)
        return found


@pytest.mark.parametrize("what", SAME)
async def test_killed_program_ends_as_an_undisturbed_one(box: Lab, what: str) -> None:
    if what in OF_PACKAGES and read_base(box.settings) is None:
        pytest.skip("the base layer is not installed")
    code = SAME[what]
    first = Attempts(box, "undisturbed")
    result = await first.run(code)
    assert result is not None and result.error is None, result
    assert NOT_RESUMABLE not in first.readings
    for kill in (1, len(first.calls)):
        again = Attempts(box, f"killed-{kill}")
        assert await again.run(code, kill=kill) is None
        assert again.calls == first.calls[:kill]
        ended = await again.run(code)
        assert ended is not None and ended.error is None, (kill, ended)
        assert again.calls == first.calls, kill
        assert ended.output == result.output, kill
        assert again.files() == first.files(), kill


@pytest.mark.parametrize("what", TOLD)
async def test_killed_program_that_changes_files_unseen_is_not_run_again(box: Lab, what: str) -> None:
    code = TOLD[what]
    attempts = Attempts(box, "chat")
    await attempts.run(f"{code}\necho()", kill=code.count("echo(") + 1)
    assert attempts.readings[-1:] == [NOT_RESUMABLE], attempts.output
    with pytest.raises(NotUndoneError):
        await attempts.run(code)


async def test_file_that_was_emptied_unseen_and_grew_again_is_not_cut(box: Lab) -> None:
    code = """
with open("large", "ab") as file:
    echo(1)
    file.truncate(0); file.write(b"y" * 100_001); file.flush()
    echo(2)
"""
    attempts = Attempts(box, "chat")
    assert await attempts.run(code, kill=2) is None
    with pytest.raises(NotUndoneError, match="written anew"):
        await attempts.run(code)
