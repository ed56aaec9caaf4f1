"""Several models at one address: each has runners on the nodes, which share what the nodes have."""
