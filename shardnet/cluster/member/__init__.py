"""What a node does as a member of rings: its stage, its place in a ring, the orders of heads."""
