"""Transports of sessions: what servers send over stdio and HTTP, made such that the SDK reads it."""
