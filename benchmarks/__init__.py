"""Measurements of the call path beside other task queues; not shipped in the wheel."""
