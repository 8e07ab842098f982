"""Methods and jobs on hosts that share no disk."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from waiting import WAIT_SECONDS, eventually

from nekro.app import use_cases
from nekro.app.services import Services
from nekro.wire.values import decode_value

CHAT = "platform:group_1"


async def call(services: Services, method: str, *args: Any) -> object:
    envelope = await use_cases.invoke(
        services, method, args, {}, chat_key=CHAT, user_id="u1", timeout_seconds=WAIT_SECONDS
    )
    return decode_value(envelope.value_bytes(), max_bytes=1 << 20)


@pytest.fixture(scope="module")
def fleet(make_fleet: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Any:
    return make_fleet(
        plugins={"dirs": (Path(__file__).parent / "host_plugins",)},
        files={"url": f"file://{tmp_path_factory.mktemp('objects')}"},
    )


async def test_methods_and_jobs_of_a_chat_run_on_hosts_that_share_no_disk(fleet: Any, tmp_path: Path) -> None:
    other = fleet.settings.model_copy(update={"data_dir": tmp_path / "other"})
    (first,) = fleet.start("methods")
    services = fleet.services()
    await services.start()
    try:
        assert await call(services, "write", "a.txt", "from one host") == "a.txt"
        assert await call(services, "begin", "b.txt") == "b.txt"
        first.stop()
        fleet.start("methods", "long", settings=other)
        assert await call(services, "read", "/app/shared/a.txt") == "from one host"
        assert await call(services, "read", "/app/uploads/a.txt") == "from one host"

        async def job_has_ended() -> bool:
            async with services.database.read() as transaction:
                job = await transaction.jobs.find_latest("tests.hosts", "copy", "b.txt")
            return job is not None and job.state.is_final

        await eventually(job_has_ended)
        assert await call(services, "read", "/app/uploads/copied-b.txt") == "for the job, copied"
    finally:
        await services.close()
