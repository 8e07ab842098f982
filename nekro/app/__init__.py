"""What worker, gateway and command line need alike: calls, chats, approvals, budgets, the catalogue."""
