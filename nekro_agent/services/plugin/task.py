"""Older import path of background jobs."""

from __future__ import annotations

from nekro_agent.jobs import AsyncTaskFunc, AsyncTaskHandle, TaskAPI, TaskCtl, TaskRunner, TaskSignal, task

__all__ = [
    "AsyncTaskFunc",
    "AsyncTaskHandle",
    "TaskAPI",
    "TaskCtl",
    "TaskRunner",
    "TaskSignal",
    "task",
]
