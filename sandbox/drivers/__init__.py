"""Ways to isolate code on this machine, behind one protocol."""
