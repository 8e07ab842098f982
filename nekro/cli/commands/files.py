"""`nekro files`: list, get and put the files of a chat; check the store of files, and move files there."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, BinaryIO, Final

from nekro.cli.api import open_api
from nekro.cli.command import Deps, arg, chat_key, json_flag
from nekro.cli.running import run_async
from nekro_agent import layout
from nekro_agent.errors import InvalidValueError, UsageError

if TYPE_CHECKING:
    from nekro_client.async_chats import AsyncFiles

__all__ = ["EPILOG", "Args", "run"]

EPILOG: Final = """\
examples:
  nekro files list group_1
  nekro files list group_1 /app/shared --json
  nekro files get group_1 chart.png
  nekro files get group_1 /app/shared/notes.txt -
  nekro files put group_1 report.pdf
  nekro files put group_1 data.csv /app/shared/input/data.csv
  nekro files fsck
  nekro files fsck --read --repair
  nekro files import

Code in a chat's sandbox sees two areas: /app/uploads (files of messages, read-only there) and /app/shared
(its own files, and its working directory). Paths are those that the code uses: chart.png and
shared/chart.png are /app/shared/chart.png, uploads/a.csv is /app/uploads/a.csv. `get` writes to FILE
(default: the file's name, here; - is stdout) and overwrites nothing; `put` replaces a file of its name
(default: in /app/uploads), within the limits of the area; over NEKRO_URL the key needs the scope `admin` for
another area, and to replace a file. Links are refused. Without NEKRO_URL the files are those of the data
directory: with workers on other hosts, NEKRO_DATA_DIR names the one that they share, unless NEKRO_FILES__URL
names a store.
`fsck` compares the store with what the files need, and lists damaged contents with their files (exit code 1).
`import` copies the uploads, the shared files and the plugins' directories of the data directory into the
store: of plugins, what `nekro plugins` lists as synced or pinned. It can be repeated, and deletes nothing.
`--json` prints a list of {path, size_bytes, modified_at}, after `get` {path, size_bytes, file}, after `put`
{path, size_bytes}.
"""

_OF_CHATS: Final = ("list", "get", "put")
_ACTIONS: Final = (*_OF_CHATS, "fsck", "import")


@dataclass(frozen=True, kw_only=True)
class Args:
    """Arguments of `nekro files`."""

    action: str = arg(choices=_ACTIONS, metavar="ACTION", help="list, get, put, fsck or import")
    chat_key: str | None = arg(nargs="?", metavar="K", type=chat_key, help="chat; list, get and put need one")
    source: str | None = arg(
        nargs="?",
        metavar="SOURCE",
        help="list: only files below this path; get: path in the sandbox; put: file of this host",
    )
    target: str | None = arg(
        nargs="?", metavar="TARGET", help="get: file of this host, or -; put: path in the sandbox"
    )
    read: bool = arg("--read", action="store_true", help="fsck: compare the bytes too, not only sizes")
    repair: bool = arg(
        "--repair",
        action="store_true",
        help="fsck: delete altered objects, so that the next host that has such a content stores it again",
    )
    json: bool = json_flag()


def run(args: Args, deps: Deps) -> int:
    """Run the action."""
    _check(args)
    if args.action in _OF_CHATS:
        run_async(_run(args, deps))
        return 0
    from nekro.cli.views.file_store import check_store, import_files

    if args.action == "fsck":
        return run_async(check_store(deps, reads=args.read, repairs=args.repair, as_json=args.json))
    return run_async(import_files(deps, as_json=args.json))


def _check(args: Args) -> None:
    """Return if the arguments fit together.

    Raises:
        UsageError: they do not.
    """
    if args.action != "fsck" and (args.read or args.repair):
        raise UsageError("--read and --repair are options of `nekro files fsck`")
    if args.action not in _OF_CHATS:
        if args.chat_key is not None:
            raise UsageError(f"write `nekro files {args.action}` without a chat")
        return
    if args.chat_key is None:
        raise UsageError(f"name the chat: `nekro files {args.action} K`")
    if args.action == "list" and args.target is not None:
        raise UsageError("write `nekro files list K [PATH]`")
    if args.action != "list" and args.source is None:
        raise UsageError("write `nekro files get K PATH [FILE]` or `nekro files put K FILE [PATH]`")
    if args.action == "get" and args.target == "-" and args.json:
        raise UsageError("with --json the file cannot go to stdout; name a file instead of -")


async def _run(args: Args, deps: Deps) -> None:
    async with open_api(deps) as api:
        actions = {"list": _list, "get": _get, "put": _put}
        await actions[args.action](api.chat(str(args.chat_key)).files, args, deps)


async def _list(files: AsyncFiles, args: Args, deps: Deps) -> None:
    below = _directory(args.source)
    listed = await files.list()
    found = sorted(
        (file.path, file.size_bytes, file.created_at)
        for file in listed
        if below is None or PurePosixPath(file.path).is_relative_to(below)
    )
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


async def _get(files: AsyncFiles, args: Args, deps: Deps) -> None:
    path = str(args.source)
    if args.target == "-":
        await files.download((await files.find(path)).id, sys.stdout.buffer)
        sys.stdout.buffer.flush()
        return
    target, size = await _copy_here(files, path, Path(args.target or PurePosixPath(path).name))
    if args.json:
        deps.output.json({"path": path, "size_bytes": size, "file": str(target)})
    else:
        deps.output.words(f"wrote {size} bytes to {target}")


async def _copy_here(files: AsyncFiles, path: str, target: Path) -> tuple[Path, int]:
    """Copy a file of the chat to this host; returns the written file and its size in bytes.

    Args:
        path: as sandboxed code may write it.
        target: the file, or a folder that gets a file of the same name.

    Raises:
        UsageError: it exists already, cannot be written, or the path is refused.
        NotFoundError: the chat has no such file.
    """
    file = await files.find(path)
    target, copy = _created(target, PurePosixPath(path).name)
    try:
        with copy:
            return target, await files.download(file.id, copy)
    except BaseException:
        target.unlink(missing_ok=True)
        raise


def _created(target: Path, name: str) -> tuple[Path, BinaryIO]:
    if target.is_dir():
        target = target / name
    try:
        # Not through a link, and over no other file.
        return target, target.open("xb")
    except FileExistsError as exc:
        raise UsageError(f"{target} exists; name another file") from exc
    except OSError as exc:
        raise UsageError(f"cannot write {target}: {exc.strerror}") from exc


async def _put(files: AsyncFiles, args: Args, deps: Deps) -> None:
    source = Path(str(args.source))
    _require_readable(source)
    name, path = _place(source.name, args.target)
    stored = await files.upload(source, name=name, path=path, replace=True)
    if args.json:
        deps.output.json({"path": stored.path, "size_bytes": stored.size_bytes})
    else:
        deps.output.words(f"stored {stored.size_bytes} bytes as {stored.path}")


def _require_readable(source: Path) -> None:
    if not source.is_file():
        raise UsageError(f"{source} {'is not an ordinary file' if source.exists() else 'does not exist'}")
    try:
        source.open("rb").close()
    except OSError as exc:
        raise UsageError(f"cannot read {source}: {exc.strerror}") from exc


def _place(name: str, target: str | None) -> tuple[str, str | None]:
    """Return the name of a file among the uploads, and the path if it is not stored there."""
    from nekro_agent.files.areas import safe_basename
    from nekro_agent.tools.path_convertor import absolute_sandbox_path

    uploads, plain = PurePosixPath(layout.SANDBOX_UPLOADS), safe_basename(name)
    try:
        path = uploads if target is None else absolute_sandbox_path(target)
    except InvalidValueError as exc:
        raise UsageError(str(exc)) from exc
    if path == uploads:
        return plain, None
    is_upload = (
        path.parent == uploads and not str(target).endswith("/") and safe_basename(path.name) == path.name
    )
    return (path.name, None) if is_upload else (plain, target)
