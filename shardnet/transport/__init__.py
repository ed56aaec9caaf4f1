"""Links that move bytes: over TCP and in memory."""
