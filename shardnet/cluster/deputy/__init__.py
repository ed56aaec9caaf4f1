"""What a head copies to its deputy, which goes on in its place."""
