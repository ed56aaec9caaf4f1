"""From a checkpoint to a stage that computes."""
