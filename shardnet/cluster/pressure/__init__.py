"""When a node gives memory and processors back to its machine. Pure."""
