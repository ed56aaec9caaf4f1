"""The node: its parts and the messages that reach it."""
