"""Older import path of background jobs."""

from __future__ import annotations

from nekro_agent.jobs import AsyncTaskHandle, TaskCtl, TaskRunner, TaskSignal, task

__all__ = ["AsyncTaskHandle", "TaskCtl", "TaskRunner", "TaskSignal", "task"]
