"""How calls scale: figures of this machine, and a simulation of fleets that it cannot hold."""
