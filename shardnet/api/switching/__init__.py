"""Which model the ring has: turns of models, loading, unloading when nobody asks."""
