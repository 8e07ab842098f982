"""How a task message reaches a worker: queues, leases of deliveries, direct delivery to idle workers."""
