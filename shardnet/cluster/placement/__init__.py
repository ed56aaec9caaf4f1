"""Which node runs which layers. Pure."""
