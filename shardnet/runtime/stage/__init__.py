"""A stage at work: its threads, its compute, what the tail adds."""
