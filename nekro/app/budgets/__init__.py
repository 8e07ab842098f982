"""Budgets: what rounds, runs of code and plugins' requests to models may spend."""
