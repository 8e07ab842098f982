"""Operation of any process: probes, metrics, logs, the clock."""
