"""What several commands show: chats, rounds, jobs, the catalogue."""
