"""Operation of workers: health, printed lines, shutdown, the sweep."""
