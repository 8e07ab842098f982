"""What waits to leave the system: requests to clients of adapters, and deliveries to webhooks."""
