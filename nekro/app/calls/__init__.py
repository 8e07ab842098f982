"""Calls of plugin methods, as their callers see them: dispatch, detaching, results."""
