"""What a round reads for its prompt: input, history with its summary, pictures."""
