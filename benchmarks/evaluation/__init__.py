"""Tasks that the whole system plays with a scripted or a real model, beside classic tool calling."""
