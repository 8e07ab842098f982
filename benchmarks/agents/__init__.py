"""Whole agent systems that answer the same message with the same model: this project and its peers.

The peers' modules run in an environment of their own (`scripts/install-agent-peers`), which does not have
this project: they import nothing of it, and nothing of `benchmarks` outside of this package.
"""
