"""The HTTP server without any dialect (docs/server.md)."""
