"""Benchmarks of the call path in comparison with other task queues; not part of the wheel."""
