"""Rounds of the LLM: requested, drained in order, recorded, stopped."""
