"""Celery pools on event loops, and what runs one delivery in them."""
