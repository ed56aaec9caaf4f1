"""The peers of a node: found, linked to, kept."""
