"""A stage that runs: its threads, its compute, its sampling on the last stage."""
