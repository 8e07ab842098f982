"""Events of chats for the readers of this process."""
