"""A host that is killed before it records the end of its download; started by `test_stored_downloads.py`."""

from __future__ import annotations

import os
import signal
from typing import Any

from benchmarks.harness.downloading_host import main
from workers.jobs.downloads import SqlDownloadClaim


async def die(*_args: Any, **_options: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    setattr(SqlDownloadClaim, "end", die)  # noqa: B010
    main()
