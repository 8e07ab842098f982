"""Lists for people who look for something: chats and turns, without what only one of them needs."""
