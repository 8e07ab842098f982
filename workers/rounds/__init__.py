"""Rounds of the LLM in a worker: drained in order, with their context."""
