"""The dashboard: what the page for people shows, and what they do there."""
