"""Scaling of calls: measurements on this machine, and a simulation of larger fleets."""
