"""What the head of a ring does with its stages: building, watching, moving, ending."""
