"""`nekro files`: list, get and put the files of a chat."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Final

from broker_config.settings import Settings
from nekro.cli.command import Deps, arg, chat_key, json_flag
from nekro.cli.gateway_client import open_client
from nekro.cli.running import run_async
from nekro.cli.services.database import open_database
from nekro_agent import layout
from nekro_agent.errors import InvalidValueError, NotFoundError, UsageError

if TYPE_CHECKING:
    from nekro.app.chats.files import ChatFiles
    from nekro_agent.ports import ChatInfo
    from nekro_client.chats import Files
    from nekro_client.models import FileInfo

__all__ = [
    "EPILOG",
    "Args",
    "check",
    "download",
    "find_file",
    "run",
    "run_over_gateway",
    "save",
    "show_got",
    "show_list",
    "show_put",
]


EPILOG: Final = """\
examples:
  nekro files list group_1
  nekro files list group_1 /app/shared --json
  nekro files get group_1 chart.png
  nekro files get group_1 /app/shared/notes.txt -
  nekro files put group_1 report.pdf
  nekro files put group_1 data.csv /app/shared/input/data.csv

Code in a chat's sandbox sees two areas: /app/uploads (files of messages, read-only there) and /app/shared
(its own files, and its working directory). Paths are those that the code uses: chart.png and
shared/chart.png are /app/shared/chart.png, uploads/a.csv is /app/uploads/a.csv. `get` writes to FILE
(default: the file's name, here; - is stdout) and overwrites nothing; `put` replaces a file of its name
(default: in /app/uploads), within the limits of the area. Links are refused. The files are those of the
data directory: with workers on other hosts, NEKRO_DATA_DIR names the one that they share.
`--json` prints a list of {path, size_bytes, modified_at}, after `get` {path, size_bytes, file}, after `put`
{path, size_bytes}.
"""

_ACTIONS: Final = ("list", "get", "put")


@dataclass(frozen=True, kw_only=True)
class Args:
    """Arguments of `nekro files`."""

    action: str = arg(choices=_ACTIONS, metavar="ACTION", help="list, get or put")
    chat_key: str = arg(metavar="K", type=chat_key, help="chat")
    source: str | None = arg(
        nargs="?",
        metavar="SOURCE",
        help="list: only files below this path; get: path in the sandbox; put: file of this host",
    )
    target: str | None = arg(
        nargs="?", metavar="TARGET", help="get: file of this host, or -; put: path in the sandbox"
    )
    json: bool = json_flag()


def run(args: Args, deps: Deps) -> int:
    """Run the action."""
    check(args)
    from broker_config.embedded import resolve_settings
    from nekro.cli.services.database import open_chat_files

    settings = resolve_settings(deps.load_settings())
    chat = run_async(_chat(settings, args.chat_key))
    with open_chat_files(settings, chat) as files:
        {"list": _list, "get": _get, "put": _put}[args.action](files, args, deps)
    return 0


def check(args: Args) -> None:
    """Return if the arguments fit together.

    Raises:
        UsageError: they do not.
    """
    if args.action == "list" and args.target is not None:
        raise UsageError("write `nekro files list K [PATH]`")
    if args.action != "list" and args.source is None:
        raise UsageError("write `nekro files get K PATH [FILE]` or `nekro files put K FILE [PATH]`")
    if args.action == "get" and args.target == "-" and args.json:
        raise UsageError("with --json the file cannot go to stdout; name a file instead of -")


async def _chat(settings: Settings, key: str) -> ChatInfo:
    async with open_database(settings) as database, database.read() as transaction:
        chat = await transaction.chats.find(key)
    if chat is None:
        raise NotFoundError(f"there is no chat {key!r}; `nekro send` creates one")
    return chat


def _list(files: ChatFiles, args: Args, deps: Deps) -> None:
    show_list([(file.path, file.size_bytes, _moment(file.modified_at)) for file in files.list()], args, deps)


def show_list(files: Iterable[tuple[str, int, datetime | None]], args: Args, deps: Deps) -> None:
    """Print files by path, size in bytes and time of the last change: those below the stated path."""
    below = _directory(args.source)
    found = sorted(file for file in files if below is None or PurePosixPath(file[0]).is_relative_to(below))
    if args.json:
        deps.output.json([{"path": path, "size_bytes": size, "modified_at": at} for path, size, at in found])
        return
    rows = [(size, f"{at:%Y-%m-%d %H:%M:%S}" if at else "", path) for path, size, at in found]
    deps.output.table(("BYTES", "CHANGED (UTC)", "PATH"), rows)


def _directory(source: str | None) -> PurePosixPath | None:
    """Return the path in the sandbox that a user wrote; None for both areas."""
    if source is None or PurePosixPath(source) in (PurePosixPath(), PurePosixPath(layout.SANDBOX_ROOT)):
        return None
    from nekro_agent.tools.path_convertor import absolute_sandbox_path

    try:
        return absolute_sandbox_path(source)
    except InvalidValueError as exc:
        raise UsageError(
            f"{source} lies in neither {layout.SANDBOX_UPLOADS} nor {layout.SANDBOX_SHARED}"
        ) from exc


def _get(files: ChatFiles, args: Args, deps: Deps) -> None:
    path = str(args.source)
    if args.target == "-":
        with files.open(path) as file:
            shutil.copyfileobj(file, sys.stdout.buffer)
        sys.stdout.buffer.flush()
        return
    target, size = save(files, path, Path(args.target or PurePosixPath(path).name))
    show_got(path, target, size, args, deps)


def show_got(path: str, target: Path, size: int, args: Args, deps: Deps) -> None:
    """Print that a file was copied to this host."""
    if args.json:
        deps.output.json({"path": path, "size_bytes": size, "file": str(target)})
    else:
        deps.output.words(f"wrote {size} bytes to {target}")


def _put(files: ChatFiles, args: Args, deps: Deps) -> None:
    source = Path(str(args.source))
    path = files.put(source, args.target)
    show_put(path, source.stat().st_size, args, deps)


def show_put(path: str, size: int, args: Args, deps: Deps) -> None:
    """Print that a file was stored."""
    if args.json:
        deps.output.json({"path": path, "size_bytes": size})
    else:
        deps.output.words(f"stored {size} bytes as {path}")


def save(files: ChatFiles, path: str, target: Path) -> tuple[Path, int]:
    """Copy a file of the chat to this host; returns the written file and its size in bytes.

    Args:
        target: the file, or a folder that gets a file of the same name.

    Raises:
        UsageError: it exists already, cannot be written, or the path is refused.
        NotFoundError: the chat has no such file.
    """
    if target.is_dir():
        target = target / PurePosixPath(path).name
    with files.open(path) as source:
        try:
            # Not through a link, and over no other file.
            copy = target.open("xb")
        except FileExistsError as exc:
            raise UsageError(f"{target} exists; name another file") from exc
        except OSError as exc:
            raise UsageError(f"cannot write {target}: {exc.strerror}") from exc
        try:
            with copy:
                shutil.copyfileobj(source, copy)
                return target, copy.tell()
        except BaseException:
            target.unlink(missing_ok=True)
            raise


def _moment(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)


def run_over_gateway(args: Args, deps: Deps) -> int:
    """Run the action."""
    check(args)
    with open_client() as client:
        files = client.chat(args.chat_key).files
        {"list": _list_over_gateway, "get": _get_over_gateway, "put": _put_over_gateway}[args.action](
            files, args, deps
        )
    return 0


def find_file(files: Files, path: str) -> FileInfo:
    """Return the file of a path in the sandbox, as sandboxed code writes it.

    Raises:
        NotFoundError: the chat has no such file.
    """
    wanted = _absolute(path)
    for file in files.list():
        if PurePosixPath(file.path) == wanted:
            return file
    raise NotFoundError(f"the chat has no file {path}; `nekro files list` lists its files")


def download(files: Files, file: FileInfo, target: Path) -> tuple[Path, int]:
    """Copy a file of the chat to this host; as ``nekro.cli.commands.files.save``."""
    if target.is_dir():
        target = target / PurePosixPath(file.path).name
    try:
        return target, files.download(file.id, target)
    except FileExistsError as exc:
        raise UsageError(f"{target} exists; name another file") from exc
    except OSError as exc:
        raise UsageError(f"cannot write {target}: {exc.strerror}") from exc


def _absolute(path: str) -> PurePosixPath:
    """Return the absolute form of a path as sandboxed code writes it; a path of no area as it is."""
    from nekro_agent.tools.path_convertor import absolute_sandbox_path

    try:
        return absolute_sandbox_path(path)
    except InvalidValueError:
        return PurePosixPath(path)


def _list_over_gateway(files: Files, args: Args, deps: Deps) -> None:
    found = [(file.path, file.size_bytes, file.created_at) for file in files.list()]
    show_list(found, args, deps)


def _get_over_gateway(files: Files, args: Args, deps: Deps) -> None:
    path = str(args.source)
    file = find_file(files, path)
    if args.target == "-":
        files.download(file.id, sys.stdout.buffer)
        sys.stdout.buffer.flush()
        return
    target, size = download(files, file, Path(args.target or PurePosixPath(path).name))
    show_got(path, target, size, args, deps)


def _put_over_gateway(files: Files, args: Args, deps: Deps) -> None:
    source = Path(str(args.source))
    name = source.name
    if args.target is not None:
        target = _absolute(args.target)
        if target.parts[:3] != ("/", "app", "uploads") or len(target.parts) > 4:
            raise UsageError(f"{args.target}: files are put into /app/uploads over a gateway")
        name = source.name if len(target.parts) == 3 else target.name
    if not source.is_file():
        raise UsageError(f"{source} {'is not an ordinary file' if source.exists() else 'does not exist'}")
    stored = files.upload(source, name=name)
    show_put(stored.path, stored.size_bytes, args, deps)
