"""Run code of a language model in isolation and pass its calls to plugins."""
