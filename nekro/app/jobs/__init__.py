"""Background jobs, as callers see them: their data, their cancellation."""
