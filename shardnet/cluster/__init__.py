"""Many nodes: profile, placement, membership, and the node that ties the rooms together."""
