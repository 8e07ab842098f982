"""What was in the shared files before the code changed them, so that another attempt begins as this one did.

Before the interpreter changes a file below ``/app/shared``, it raises an audit event, also for ``pathlib``,
``shutil`` and packages that use Python's files. At the first change of a path its original is saved in a
directory of the run (``originals``), from which the host restores it (``nekro.sandbox.undo``).

A program cannot be run again when its copies would take too much room, when it starts another program, which
changes files unseen, and when a method that got the path of such a file has changed it, as an answer that is
repeated changes nothing. Nor can it when it loads a library that opens files itself (``UNSEEN_WRITERS``), or
calls functions of any library by ``ctypes``. Libraries that open files and are not listed are not seen.
"""

from __future__ import annotations

import os
import sys
from _thread import RLock, get_ident
from typing import TYPE_CHECKING

from nekro.sandbox.guest.channel import unsignalled
from nekro.sandbox.guest.listings import UNDO_NAME
from nekro.sandbox.guest.originals import APPEND, MOST_RECORDS, REMOVE, WRITE, Originals
from nekro.sandbox.guest.readings import unbound

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

__all__ = ["UNDO_LOG", "UndoLog"]

WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
#: What the flags of a file are to contain, and be of these, when it can only become longer.
APPENDS, OF_APPENDS = os.O_WRONLY | os.O_APPEND, os.O_ACCMODE | os.O_APPEND | os.O_TRUNC
SQLITE_ATTACH = 24
#: Modules that change files, or start interpreters that do, without an event. Of packages, those that write
#: by a library of their own; many others let Python open their files.
UNSEEN_WRITERS = {
    "_dbm", "_gdbm", "multiprocessing.popen_forkserver", "multiprocessing.popen_spawn_posix",
    "apsw", "cv2", "duckdb", "fiona", "fitz", "h5py", "lightgbm", "lmdb", "netCDF4", "osgeo", "polars",
    "pyarrow.csv", "pyarrow.dataset", "pyarrow.feather", "pyarrow.fs", "pyarrow.orc", "pyarrow.parquet",
    "pymupdf", "pyogrio", "rasterio", "soundfile", "tables", "tensorflow", "torch", "xgboost",
}  # fmt: skip


class UndoLog:
    """The originals of one run."""

    def __init__(self) -> None:
        self._root = ""
        self._originals = Originals("", "", 0)
        #: Canonical paths of names as the code wrote them, while no directory changes.
        self._paths: dict[tuple[Any, bool], str] = {}
        self._directories: dict[str, str] = {}
        #: Whether the code has made links: another thread may have resolved a path just before.
        self._has_links = False
        self._lock = RLock()
        #: The thread that saves: what it does itself is not saved.
        self._thread = 0
        self.is_on = False
        #: Called when the program cannot be run again.
        self.on_give_up: Callable[[], None] = lambda: None

    def begin(self, root: str, name: str, most_bytes: int) -> None:
        """Begin to save.

        Args:
            root: the shared files.
            name: the run's directory.
            most_bytes: of all copies.
        """
        self._root = root
        self._originals = Originals(root, f"{root}/{UNDO_NAME}/{name}", most_bytes)
        self.is_on = True
        os.register_at_fork(before=self._expect_fork, after_in_child=self._renew_lock)
        self._replace_open()
        sys.addaudithook(self._audit)
        if not UNSEEN_WRITERS.isdisjoint(sys.modules):
            self.give_up()

    def _expect_fork(self) -> None:
        self._originals.is_alone = False

    def _renew_lock(self) -> None:
        self._lock, self._thread = RLock(), 0

    def _replace_open(self) -> None:
        """Replace ``os.open``, whose event does not tell the directory of a relative path."""
        system = os.open

        @unbound(system)
        def open_file(path: Any, flags: int, mode: int = 0o777, *, dir_fd: Any = None) -> int:
            if dir_fd is not None and flags & WRITES:
                path, dir_fd = os.path.join(name_of(dir_fd), os.fsdecode(path)), None
            return system(path, flags, mode, dir_fd=dir_fd)

        os.open = open_file
        os.supports_dir_fd.add(open_file)

    def _audit(self, event: str, args: tuple[Any, ...]) -> None:
        action = ACTIONS.get(event)
        if action is None or not self.is_on or self._thread == get_ident():
            return
        if event == "open" and (not args[2] & WRITES or self._is_saved(args[0], args[2])):
            return
        if event == "import" and args[0] not in UNSEEN_WRITERS:
            return
        # A handler would run unseen here, and what it raises would be taken for a failure.
        unsignalled(self._act, action, args)

    def _is_saved(self, path: Any, flags: int) -> bool:
        """Whether nothing is to be saved before this file is opened, as most often."""
        real = self._paths.get((path, True)) if type(path) is str else None
        if not real:
            return real is not None
        return self._originals.has(real, appends=flags & OF_APPENDS == APPENDS)

    def _act(self, action: Callable[..., None], args: tuple[Any, ...]) -> None:
        with self._lock:
            self._thread = get_ident()
            try:
                action(self, *args)
            except Exception:
                self.give_up()
            finally:
                self._thread = 0

    def give_up(self) -> None:
        """Save no more: the program cannot be run again."""
        if self.is_on:
            self.is_on = False
            self.on_give_up()
            try:  # noqa: SIM105 - contextlib is slow to import
                self._originals.refuse()
            except OSError:  # the host sees it at the next call only
                pass

    def watch(self, arguments: bytes) -> Callable[[], None] | None:
        """Return what to call after a method that got these arguments has answered; None: nothing."""
        if not self.is_on:
            return None
        before = {
            path: identity(path)
            for path in self._originals.paths
            if os.fsencode(path.rpartition("/")[2]) in arguments
        }
        if not before:
            return None

        def check() -> None:
            if any(identity(path) != seen for path, seen in before.items()):
                self.give_up()

        return check

    def _save(self, path: str, change: int) -> None:
        if not self._originals.save(path, change):
            self.give_up()

    def _opened(self, path: Any, mode: Any, flags: int) -> None:
        if type(path) is not int and (real := self._real(path)):
            self._save(real, APPEND if flags & OF_APPENDS == APPENDS else WRITE)

    def _removed(self, path: Any, dir_fd: int) -> None:
        if real := self._real(path, dir_fd, follows=False):
            self._save(real, REMOVE)
        if os.path.islink(real or path):
            self._forget_paths()

    def _made(self, path: Any, *rest: Any) -> None:
        if real := self._real(path, rest[-1] if rest else -1, follows=False):
            self._save(real, REMOVE)

    def _renamed(self, source: Any, target: Any, source_fd: int = -1, target_fd: int = -1) -> None:
        self._forget_paths()
        old, new = (
            self._real(source, source_fd, follows=False),
            self._real(target, target_fd, follows=False),
        )
        if old:
            # A copy and no link: the file keeps another name, and methods refuse files with two names.
            self._save(old, WRITE)
        if new:
            self._save(new, REMOVE)
        is_link = os.path.islink(old)
        self._has_links |= is_link
        if old and os.path.isdir(old) and not is_link:
            for directory, directories, files in os.walk(old):
                for name in (*directories, *files):
                    path = f"{directory}/{name}"
                    self._save(path, WRITE)
                    if new:
                        self._save(new + path[len(old) :], REMOVE)

    def _linked(self, source: Any, target: Any, source_fd: int = -1, target_fd: int = -1) -> None:
        if old := self._real(source, source_fd):
            self._save(old, WRITE)
        self._made(target, target_fd)

    def _symlinked(self, source: Any, target: Any, dir_fd: int = -1) -> None:
        self._forget_paths()
        self._has_links = True
        self._made(target, dir_fd)

    def _cut(self, path: Any, length: Any) -> None:
        if real := self._real(path):
            self._save(real, WRITE)

    def _marked(self, path: Any, *rest: Any) -> None:
        if real := self._real(path, rest[-1] if type(rest[-1]) is int else -1):
            self._save(real, APPEND)

    def _connected(self, path: Any) -> None:
        text = os.fsdecode(path)
        if not text.startswith("file:"):
            return self._save_base(text)
        if "%" in text:
            return self.give_up()
        self._save_base(text)  # that is its name, if the connection takes no URI
        name = text[len("file:") :].partition("?")[0].partition("#")[0]
        self._save_base(f"/{name[2:].partition('/')[2]}" if name.startswith("//") else name)

    def _save_base(self, path: str) -> None:
        """Save a file of SQLite, and those that it may make beside it."""
        for suffix in ("", "-journal", "-wal", "-shm"):
            if path not in ("", ":memory:") and (real := self._real(path + suffix)):
                self._save(real, WRITE)

    def watch_sqlite(self, module: Any) -> None:
        """Save the databases that statements open, ATTACH and VACUUM INTO, which raise no event."""
        original = module.connect

        @unbound(original)
        def connect(*args: Any, **kwargs: Any) -> Any:
            connection = original(*args, **kwargs)
            if self.is_on:
                connection.set_authorizer(authorise)
            return connection

        def authorise(action: int, path: Any, *_: Any) -> int:
            if action == SQLITE_ATTACH and self.is_on:
                if path is None:  # an expression
                    self.give_up()
                else:
                    unsignalled(self._act, UndoLog._connected, (path,))
            return 0

        module.connect = module.dbapi2.connect = connect

    def _forget_paths(self, *_: Any) -> None:
        self._paths.clear()
        self._directories.clear()

    def _started(self, *_: Any) -> None:
        self.give_up()

    def _looked_up(self, _library: Any, name: Any) -> None:
        # Functions of the interpreter itself begin so: importing `ctypes` and packages that use it take some.
        if type(name) is not str or not name.startswith(("Py", "_Py")):
            self.give_up()

    def _real(self, path: Any, dir_fd: int = -1, *, follows: bool = True) -> str:
        """Return the canonical path; "" outside of the shared files."""
        key = None if type(path) is int or dir_fd != -1 else (path, follows)
        if key is not None and (known := self._paths.get(key)) is not None:
            return known
        if type(path) is int:
            real = name_of(path)
        else:
            text = os.fsdecode(path)
            if dir_fd != -1:
                text = os.path.join(name_of(dir_fd), text)
            text = os.path.abspath(text)
            head, _, name = text.rpartition("/")
            directory = self._directories.get(head)
            if directory is None:
                directory = os.path.realpath(head or "/")
                if not self._has_links:
                    self._directories[head] = directory
            real = f"{directory}/{name}"
            if follows and os.path.islink(real):
                real = os.path.realpath(real)
        if not real.startswith(f"{self._root}/") or real.startswith(f"{self._root}/{UNDO_NAME}"):
            real = ""
        if key is not None and len(self._paths) < MOST_RECORDS and not self._has_links:
            self._paths[key] = real
        return real


#: What to do at each event of the interpreter, with the event's arguments.
ACTIONS: dict[str, Any] = {
    "open": UndoLog._opened,
    "os.remove": UndoLog._removed,
    "os.rmdir": UndoLog._removed,
    "os.mkdir": UndoLog._made,
    "os.rename": UndoLog._renamed,
    "os.link": UndoLog._linked,
    "os.symlink": UndoLog._symlinked,
    "os.truncate": UndoLog._cut,
    "os.chmod": UndoLog._marked,
    "os.utime": UndoLog._marked,
    "os.chdir": UndoLog._forget_paths,
    "sqlite3.connect": UndoLog._connected,
    "import": UndoLog._started,
    "ctypes.dlsym": UndoLog._looked_up,
    "ctypes.dlsym/handle": UndoLog._started,
    "subprocess.Popen": UndoLog._started,
    "os.system": UndoLog._started,
    "os.exec": UndoLog._started,
    "os.posix_spawn": UndoLog._started,
}
UNDO_LOG = UndoLog()


def name_of(descriptor: int) -> str:
    """Return the path of an open file."""
    return os.readlink(f"/proc/self/fd/{descriptor}")


def identity(path: str) -> tuple[int, int, int] | None:
    """Return what differs once a file has been changed; None if it does not exist."""
    try:
        info = os.lstat(path)
    except OSError:
        return None
    return info.st_ino, info.st_size, info.st_mtime_ns
