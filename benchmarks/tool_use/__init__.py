"""One task as a program that calls methods, and as classic tool calling."""
