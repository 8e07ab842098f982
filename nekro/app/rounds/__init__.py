"""Rounds as rows and events: requested, recorded, stopped; runs of code without a model."""
