"""The flags of commands."""
