"""The console: its pages, and the session of the browser that shows them."""
