"""The whole HTTP server: every dialect on one socket."""
