"""The dashboard: its data and its page (docs/dashboard.md)."""
