"""The HTTP API: thin."""
