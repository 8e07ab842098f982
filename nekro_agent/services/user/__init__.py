"""The holders of a gateway's keys, for routes of plugins that ask who sends a request."""
