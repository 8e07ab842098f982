"""Jobs over the API: the log of one, and starting one again."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from test_gateway_costs import key_of

from nekro.app.services import Services
from nekro.operations.actor import Scope
from nekro_client import AsyncClient
from nekro_client.errors import ConflictError
from storage.repositories.jobs import Job, NewJob
from storage.states import JobState

ARGS = {"arguments": [["rolls"], {"count": 40}]}


async def ended(services: Services, state: JobState = JobState.FAILED, **values: Any) -> Job:
    """A job of one attempt that has ended."""
    given: dict[str, Any] = {"task_id": "rolls", "args": ARGS, "turn_id": "turn", "call_id": "call"} | values
    async with services.database.begin() as tx:
        await tx.chats.ensure("bakery")
        job = await tx.jobs.add(NewJob(type="bake", plugin_key="a.oven", chat_key="bakery", **given))
        claimed = await tx.jobs.claim(job.id, worker="w1", lease_seconds=60)
        assert claimed is not None
        fence = claimed.fence
        await tx.jobs.progress(job.id, fence=fence, percent=40, message="", logged_as="16 of 40")
        await tx.jobs.log(job.id, ("WARNING", "it is hot"), fence=fence)
        return await tx.jobs.finish(job.id, fence=fence, state=state, message="burnt")


async def test_a_failed_job_starts_again_as_a_new_one_with_its_arguments(
    services: Services, http: httpx.AsyncClient
) -> None:
    old = await ended(services)
    http.headers.update(await key_of(services.database, scopes=(Scope.ADMIN,)))
    path, key = f"/api/v1/jobs/{old.id}", {"Idempotency-Key": "again-1"}
    assert (await http.get(path)).json()["can_retry"] is True
    first = await http.post(f"{path}/retry", headers=key)
    assert first.status_code == 201, first.text
    assert (await http.post(f"{path}/retry", headers=key)).json() == first.json()
    assert (await http.post(f"{path}/retry")).status_code == 409  # a job of its name is open
    found = first.json()
    assert (found["state"], found["retry_of"], found["can_retry"]) == ("queued", old.id, False)
    async with services.database.read() as tx:
        new, unchanged = await tx.jobs.get(found["id"]), await tx.jobs.get(old.id)
        acts = await tx.audit.newest(limit=1)
    async with services.database.begin() as tx:
        assert await tx.keys.pass_on(new.id, "probe"), "no key pays for the new job"
    assert unchanged == old
    names = ("type", "task_id", "plugin_key", "chat_key", "args", "on_crash", "turn_id", "call_id")
    assert [getattr(new, name) for name in names] == [getattr(old, name) for name in names]
    assert [(act.action, act.subject) for act in acts] == [("job.retry", old.id)]


@pytest.mark.parametrize("case", ["succeeded", "call", "open", "missing"])
async def test_a_job_that_cannot_start_again_is_refused(
    services: Services, http: httpx.AsyncClient, case: str
) -> None:
    if case == "succeeded":
        job_id = (await ended(services, JobState.SUCCEEDED)).id
    elif case == "call":
        job_id = (await ended(services, args=None)).id
    elif case == "open":
        async with services.database.begin() as tx:
            new = NewJob(type="bake", task_id="t", plugin_key="a.oven", chat_key="bakery", args=ARGS)
            job_id = (await tx.jobs.add(new)).id
    else:
        job_id = "missing"
    answer = await http.post(f"/api/v1/jobs/{job_id}/retry")
    assert answer.status_code == (404 if case == "missing" else 409), answer.text
    async with services.database.read() as tx:
        assert len(await tx.jobs.newest(limit=9)) == (0 if case == "missing" else 1)


async def test_the_log_shows_attempts_reports_and_lines_to_readers_of_the_chat(
    services: Services, http: httpx.AsyncClient
) -> None:
    job = await ended(services)
    key = http.headers["Authorization"].removeprefix("Bearer ")
    async with AsyncClient(str(http.base_url), key=key) as client:
        log = await client.jobs.log(job.id)
        with pytest.raises(ConflictError):
            await client.jobs.retry((await ended(services, JobState.SUCCEEDED, task_id="other")).id)
    (attempt,) = log.attempts
    assert (attempt.number, attempt.worker, attempt.outcome, attempt.message) == (1, "w1", "failed", "burnt")
    assert attempt.ended_at is not None
    assert [(one.kind, one.level or one.percent, one.text) for one in log.entries] == [
        ("started", None, ""),
        ("report", 40, "16 of 40"),
        ("line", "WARNING", "it is hot"),
        ("failed", None, "burnt"),
    ]
    for chats, status in (("bakery", 200), ("other", 404)):
        headers = await key_of(services.database, scopes=(Scope.READ,), chats=chats)
        assert (await http.get(f"/api/v1/jobs/{job.id}/log", headers=headers)).status_code == status
        assert (await http.post(f"/api/v1/jobs/{job.id}/retry", headers=headers)).status_code == 403
