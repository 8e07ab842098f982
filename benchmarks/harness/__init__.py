"""What every benchmark shares: processes, one Redis, turns, arithmetic, the report."""
