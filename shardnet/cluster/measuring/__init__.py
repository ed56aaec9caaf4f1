"""How fast nodes and links are."""
