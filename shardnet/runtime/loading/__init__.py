"""From checkpoints to stages that compute."""
