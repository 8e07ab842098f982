"""Reads what a model answered: notations, blocks, kinds of answers, and what each leads to."""
