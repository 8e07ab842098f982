"""The page of a job: its state, attempts, log and result; it is cancelled, and started again as a new job."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from console_world import DESKTOP, PHONE, Console, Watched, axe_script, axe_violations

pytestmark = pytest.mark.extended


@pytest.fixture
def job(console: Console, request: pytest.FixtureRequest) -> dict[str, Any]:
    """A job that waits for a signal."""
    name = f"rolls-{request.node.callspec.id if hasattr(request.node, 'callspec') else 'all'}"
    turn = console.say(f"bakery-{name}", "Bake.", f"bake({name!r})", wait=60)
    console.ended(turn)
    (job,) = (one for one in console.turn(turn)["jobs"] if one["task_id"] == name)
    return dict(job)


def texts(window: Watched, table: str, column: int) -> list[str]:
    cells = window.page.get_by_role("table", name=table, exact=True).locator(f"tbody td:nth-child({column})")
    return [text.strip() for text in cells.all_inner_texts()]


@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_a_job_shows_its_attempts_and_log_is_cancelled_and_starts_again(
    console: Console, job: dict[str, Any], picture: Callable[..., None], size: dict[str, int]
) -> None:
    with console.window(size=size) as window:
        page = window.go("#/jobs")
        page.get_by_role("link", name=job["task_id"], exact=True).click()
        page.get_by_role("heading", name=job["task_id"]).wait_for()
        page.get_by_text("The oven is hot.").wait_for()
        page.get_by_text("of 40 loaves").first.wait_for()
        assert texts(window, "Attempts", 1) == ["1"]
        assert page.get_by_role("link", name=job["chat_key"]).is_visible()
        assert page.get_by_role("link", name="The turn that started it").is_visible()
        page.get_by_role("button", name="Cancel the job").click()
        page.get_by_role("dialog").get_by_role("button", name="Cancel the job").click()
        again = page.get_by_role("button", name="Start again…")
        again.wait_for()
        # The page reads the log beside the job.
        for name in ("Attempts", "Log"):
            table = page.get_by_role("table", name=name, exact=True)
            table.get_by_text("Cancelled", exact=True).first.wait_for()
        assert texts(window, "Attempts", 6) == ["Cancelled"]
        shown = texts(window, "Log", 2)
        assert shown[0] == "Cancelled" and shown[-1] == "Started" and "INFO" in shown
        picture(page, f"job-{size['width']}", full_page=True)
        assert axe_violations(window, axe_script()) == []
        assert page.evaluate("() => document.documentElement.scrollWidth <= window.innerWidth")
        again.click()
        page.get_by_role("dialog").get_by_role("button", name="Start again").click()
        page.wait_for_function("old => !location.hash.endsWith(old)", arg=job["id"])
        link = page.get_by_role("link", name="The job that it repeats")
        link.wait_for()
        assert link.get_attribute("href") == f"#/jobs/{job['id']}"
        new = page.evaluate("() => location.hash").rpartition("/")[2]
        found = console.http.get(f"jobs/{new}").json()
        assert (found["task_id"], found["chat_key"], found["turn_id"]) == (
            job["task_id"], job["chat_key"], job["turn_id"],
        )  # fmt: skip
        page.get_by_text("The oven is hot.").wait_for()
        console.http.post(f"jobs/{new}/signals", json={"key": "go", "data": "crisp"})
        page.get_by_text("baked, crisp").first.wait_for()
        assert page.get_by_role("button", name="Start again…").count() == 0
        window.check()


def test_a_job_that_does_not_exist_is_reported(console: Console) -> None:
    with console.window() as window:
        page = window.go("#/jobs/nothing")
        page.get_by_text("Not found").first.wait_for()
        window.check()
