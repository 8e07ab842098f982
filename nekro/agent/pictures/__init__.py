"""Pictures of prompts: decoded in a process of their own, made small, counted."""
