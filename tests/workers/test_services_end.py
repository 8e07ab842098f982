"""The end of the services of a process."""

from __future__ import annotations

import asyncio
import gc
import os
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from loguru import logger

from broker_config.settings import DatabaseSettings, Settings
from nekro.app.services import CALLER, Services
from nekro.base.greenlet_bridge import Closing


def open_files() -> dict[str, str]:
    """What each descriptor of this process refers to, after the garbage collection closed its own."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # about what earlier tests left open
        gc.collect()
    found = {}
    for path in Path("/proc/self/fd").iterdir():
        try:
            found[path.name] = os.readlink(path)
        except FileNotFoundError:  # that of the listing itself
            continue
    return found


@pytest.mark.extended
async def test_closed_services_leave_no_descriptor_open(
    make_settings: Callable[..., Settings], migrated_copy: Callable[[str], DatabaseSettings]
) -> None:
    settings = make_settings(database=migrated_copy("sqlite").model_dump())

    kept = []  # what refers to closed services leaves nothing open either

    async def open_and_close() -> None:
        services = Services.load(settings, role=CALLER)
        kept.append(services)
        await services.start()
        assert services._caller is not None and services._caller._servers is not None
        await services._caller._servers._subscriptions[0].settle()  # not closed while it connects
        await services.publisher.round_requested("chat")
        await services.publisher.job_queued("job", "chat")
        await services.publisher.revoke("none")
        services.publisher.events_added("chat", 1)
        services.app.backend.client.ping()
        await services.close()

    await open_and_close()  # opens what a process opens once
    before = open_files()
    for _ in range(3):
        await open_and_close()
    after = open_files()
    assert len(after) <= len(before), sorted(set(after.values()) - set(before.values()))


async def test_a_cleanup_that_exceeds_its_limit_is_named_and_the_others_run(
    make_settings: Callable[..., Settings],
    migrated_copy: Callable[[str], DatabaseSettings],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = make_settings(database=migrated_copy("sqlite").model_dump())
    services = Services.load(settings, role=CALLER)
    await services.start()
    done, named = list[str](), list[tuple[str, str]]()

    def noting(step: Closing) -> Closing:
        async def cleanup() -> None:
            await step.cleanup()
            if step.what == "caller":
                await asyncio.Event().wait()
            done.append(step.what)

        return replace(step, cleanup=cleanup, seconds=0.05 if step.what == "caller" else step.seconds)

    steps = [noting(step) for step in services.closings()]
    monkeypatch.setattr(services, "closings", lambda: steps)
    sink = logger.add(
        lambda line: named.append((line.record["message"], line.record["extra"].get("what")))  # type: ignore[attr-defined]
    )
    await services.close()
    logger.remove(sink)
    assert done == [step.what for step in steps if step.what != "caller"]
    assert [found for found in named if found[0].startswith("cleanup_")] == [("cleanup_abandoned", "caller")]
