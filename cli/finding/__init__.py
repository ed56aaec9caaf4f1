"""Which node a command asks."""
