"""A conversation with a model: its messages, its commands, and the lines that are typed."""
