"""Shared parts of the benchmarks: processes, one Redis, turns, statistics, the report."""
