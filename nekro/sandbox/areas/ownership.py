"""Set the owner and the permissions of a chat's directories before a sandbox starts.

As root, the code of one container key nearly always runs as the same host user (see ``nekro.sandbox.users``);
files that an earlier run wrote as another user are given to the user of the next run.

``/app/shared`` belongs to that user. Plugins run as root and may write there at any time: the SDK's
writers give their files to the directory's owner, a default ACL makes files of other code usable, and
files that still belong to root are given to the user when a run starts. ``/app/uploads`` stays with the
service; its files are made readable.
"""

from __future__ import annotations

import contextlib
import os
import stat
import struct
from pathlib import Path
from typing import Final

from broker_config.settings import SandboxSettings
from nekro_agent.files import safe_files

__all__ = ["make_readable", "prepare_directories"]

_ACL_VERSION: Final = 2
_ACL_TAG_USER_OBJ, _ACL_TAG_USER, _ACL_TAG_GROUP_OBJ, _ACL_TAG_MASK, _ACL_TAG_OTHER = 1, 2, 4, 16, 32
_NO_ID: Final = 0xFFFFFFFF
_READ_WRITE_ENTER: Final = 7
_READ_ENTER: Final = 5


def prepare_directories(*, shared_dir: Path, uploads_dir: Path, uid: int, settings: SandboxSettings) -> None:
    """Make both directories usable for ``uid``; unless this service is root, ``uid`` is its own."""
    if os.geteuid() != 0:
        # Earlier code may have made its directory inaccessible, which would affect every later run.
        if not os.access(shared_dir, os.R_OK | os.W_OK | os.X_OK):
            with contextlib.suppress(OSError):
                os.chmod(shared_dir, 0o700)
        return
    # Twice the limit: files over the quota must change their owner too, or they could not be removed.
    most = 2 * settings.shared_files
    os.chmod(shared_dir, 0o700)
    owners = {os.geteuid(), os.stat(shared_dir).st_uid}
    safe_files.take_ownership(shared_dir, uid=uid, gid=uid, owners=owners, max_entries=most)
    # Not every file system has ACLs; without ACLs, the umask of plugins decides.
    with contextlib.suppress(OSError):
        os.setxattr(shared_dir, "system.posix_acl_default", _default_acl(uid))
    make_readable(uploads_dir)


def _default_acl(uid: int) -> bytes:
    """Encode ``u::rwx,u:<uid>:rwx,g::r-x,m::rwx,o::---``; see acl(5) and linux/posix_acl_xattr.h."""
    entries = (
        (_ACL_TAG_USER_OBJ, _READ_WRITE_ENTER, _NO_ID),
        (_ACL_TAG_USER, _READ_WRITE_ENTER, uid),
        (_ACL_TAG_GROUP_OBJ, _READ_ENTER, _NO_ID),
        (_ACL_TAG_MASK, _READ_WRITE_ENTER, _NO_ID),
        (_ACL_TAG_OTHER, 0, _NO_ID),
    )
    return struct.pack("<I", _ACL_VERSION) + b"".join(struct.pack("<HHI", *entry) for entry in entries)


def make_readable(root: Path) -> None:
    """Make directories and files below ``root`` readable for all; only the service writes there."""
    for directory, _, names in os.walk(root):
        for path in (Path(directory), *(Path(directory, name) for name in names)):
            info = path.lstat()
            wanted = _READ_ENTER if stat.S_ISDIR(info.st_mode) else 4
            if not stat.S_ISLNK(info.st_mode) and info.st_mode & wanted != wanted:
                path.chmod(stat.S_IMODE(info.st_mode) | wanted)
