"""The tasks by group, one module each; a group's tasks are its module's ``TASKS``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from benchmarks.evaluation.task import Task
from benchmarks.evaluation.tasks import answers, approvals, errors, files, frames, jobs, lookups, pictures

__all__ = ["GROUPS"]

GROUPS: Final[Mapping[str, Sequence[Task]]] = {
    "answers": answers.TASKS,
    "files": files.TASKS,
    "frames": frames.TASKS,
    "lookups": lookups.TASKS,
    "errors": errors.TASKS,
    "pictures": pictures.TASKS,
    "jobs": jobs.TASKS,
    "approvals": approvals.TASKS,
}
