"""The dashboard: the page for people."""
