"""From files to tensors: a checkpoint as a whole, and replicas."""
