"""Areas of files on a host that shares no disk with others: how they are brought, used and committed."""
