"""A whole system in processes of its own: Redis, a database, workers; shared by the tests of a module."""

from __future__ import annotations

import pytest
from waiting import WAIT_SECONDS


@pytest.fixture(autouse=True)
def patient_reads_of_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plugin's query of a job blocks its loop for a second at most; a busy machine takes longer."""
    monkeypatch.setattr("workers.jobs.service.ANSWER_SECONDS", WAIT_SECONDS)
