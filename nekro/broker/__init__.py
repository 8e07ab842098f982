"""Messages to and from workers: calls, events, results, recovery."""
