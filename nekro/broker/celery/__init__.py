"""Our subclasses of Celery's consumer, tasks, result backend and control (private API)."""
