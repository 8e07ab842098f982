"""The gateway's half of what plugins serve over HTTP: webhooks, routes and pages."""
