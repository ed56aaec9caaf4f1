"""How busy processors are, and what keeps them awake while steps come."""
