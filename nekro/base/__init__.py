"""Event loops, greenlets, deadlines and cancellation: mechanisms without knowledge of calls or rounds."""
