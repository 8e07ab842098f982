"""Calls of plugin methods: dispatch, claim, execution, record."""
