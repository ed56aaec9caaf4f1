"""What is copied to other nodes: a head's requests to its deputy, programs' values to one more."""
