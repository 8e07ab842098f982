"""One round of the LLM: prompt, answer, code extraction, run, stop type, limits."""
