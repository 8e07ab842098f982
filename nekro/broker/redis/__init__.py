"""One connection to Redis per event loop, its subscriptions, and which messages a server still has."""
