"""The shards of a stage on one machine, each a process: the node's own leads, the others follow."""
