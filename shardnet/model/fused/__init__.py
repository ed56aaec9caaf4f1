"""Sub-layers and whole stages in one call of the compiled library or of a CUDA graph."""
