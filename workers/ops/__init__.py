"""Operation of workers: health, metrics, logs, the sweep."""
