"""Models computed by the modules of an installed transformers package."""
