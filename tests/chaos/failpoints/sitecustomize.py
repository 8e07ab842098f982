"""Loaded by workers whose PYTHONPATH names this directory: ends the process at one point of a call.

``NEKRO_TEST_FAILPOINT`` names the point. ``NEKRO_TEST_FAILPOINT_ONCE`` names a file that is created when
the point is reached first, so that the next worker passes it.
"""

import os
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import PathFinder

POINT = os.environ.get("NEKRO_TEST_FAILPOINT", "")


def crash():
    """Create the file and end the process, unless the file exists."""
    try:
        os.close(os.open(os.environ["NEKRO_TEST_FAILPOINT_ONCE"], os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return
    os._exit(9)


def wrap(function, *, before=False):
    """Crash before or after an asynchronous function."""

    async def wrapped(*args, **kwargs):
        if before:
            crash()
        value = await function(*args, **kwargs)
        if not before:
            crash()
        return value

    return wrapped


POINTS = {
    "claimed": ("workers.calls.claims", "CallClaims", "claim", False),
    "ran": ("workers.calls.claims", "CallClaims", "finish", True),
    "recorded": ("workers.calls.claims", "CallClaims", "finish", False),
    "sent": ("workers.sdk_runtime", "SqlMessages", "send", False),
    "announcing": ("nekro.app.chats.publisher", "EventPublisher", "round_requested", True),
}


class Patcher(Loader):
    """Loads a module as usual, then installs the failpoint."""

    def __init__(self, loader, owner, name, before):
        self.loader, self.owner, self.name, self.before = loader, owner, name, before

    def create_module(self, spec):
        return self.loader.create_module(spec)

    def exec_module(self, module):
        self.loader.exec_module(module)
        owner = getattr(module, self.owner)
        setattr(owner, self.name, wrap(getattr(owner, self.name), before=self.before))


class Finder(MetaPathFinder):
    """Finds the one module that contains the failpoint."""

    def find_spec(self, fullname, path, target=None):
        module, owner, name, before = POINTS[POINT]
        if fullname != module:
            return None
        spec = PathFinder.find_spec(fullname, path)
        spec.loader = Patcher(spec.loader, owner, name, before)
        return spec


if POINT:
    sys.meta_path.insert(0, Finder())
