"""`nekro files` over a gateway."""

from __future__ import annotations

import sys
from pathlib import Path, PurePosixPath

from nekro.cli.command import Deps
from nekro.cli.commands.files import Args, check, show_got, show_list, show_put
from nekro.cli.remote.target import open_client
from nekro_agent.errors import InvalidValueError, NotFoundError, UsageError
from nekro_client.chats import Files
from nekro_client.models import FileInfo

__all__ = ["find", "run", "save"]


def run(args: Args, deps: Deps) -> int:
    """Run the action."""
    check(args)
    with open_client() as client:
        files = client.chat(args.chat_key).files
        {"list": _list, "get": _get, "put": _put}[args.action](files, args, deps)
    return 0


def find(files: Files, path: str) -> FileInfo:
    """Return the file of a path in the sandbox, as sandboxed code writes it.

    Raises:
        NotFoundError: the chat has no such file.
    """
    wanted = _absolute(path)
    for file in files.list():
        if PurePosixPath(file.path) == wanted:
            return file
    raise NotFoundError(f"the chat has no file {path}; `nekro files list` lists its files")


def save(files: Files, file: FileInfo, target: Path) -> tuple[Path, int]:
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


def _list(files: Files, args: Args, deps: Deps) -> None:
    found = [(file.path, file.size_bytes, file.created_at) for file in files.list()]
    show_list(found, args, deps)


def _get(files: Files, args: Args, deps: Deps) -> None:
    path = str(args.source)
    file = find(files, path)
    if args.target == "-":
        files.download(file.id, sys.stdout.buffer)
        sys.stdout.buffer.flush()
        return
    target, size = save(files, file, Path(args.target or PurePosixPath(path).name))
    show_got(path, target, size, args, deps)


def _put(files: Files, args: Args, deps: Deps) -> None:
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
