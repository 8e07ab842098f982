"""The OpenAPI document: its making, its examples and the page for readers."""
