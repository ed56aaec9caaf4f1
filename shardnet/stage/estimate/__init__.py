"""Memory of a stage, predicted before it is loaded. No torch at import."""
