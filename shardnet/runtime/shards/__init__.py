"""The shards of a stage: processes of one machine of which the node's own leads, or nodes."""
