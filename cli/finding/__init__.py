"""Which node a command talks to."""
