"""The end of the services of a process."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from pathlib import Path

from broker_config.settings import DatabaseSettings, Settings
from workers.composition import CALLER, Services


def open_files() -> dict[str, str]:
    """What each descriptor of this process refers to, after the garbage collection closed its own."""
    gc.collect()
    found = {}
    for path in Path("/proc/self/fd").iterdir():
        try:
            found[path.name] = os.readlink(path)
        except FileNotFoundError:  # that of the listing itself
            continue
    return found


async def test_closed_services_leave_no_descriptor_open(
    make_settings: Callable[..., Settings], migrated_copy: Callable[[str], DatabaseSettings]
) -> None:
    settings = make_settings(database=migrated_copy("sqlite").model_dump())

    async def open_and_close() -> None:
        services = Services.load(settings, role=CALLER)
        await services.start()
        assert services._caller is not None and services._caller._subscription is not None
        await services._caller._subscription.settle()  # not closed while it connects
        await services.publisher.round_requested("chat")
        await services.publisher.job_queued("job")
        await services.publisher.revoke("none")
        services.app.backend.client.ping()
        await services.close()

    await open_and_close()  # opens what a process opens once
    before = open_files()
    for _ in range(3):
        await open_and_close()
    after = open_files()
    assert len(after) <= len(before), sorted(set(after.values()) - set(before.values()))
