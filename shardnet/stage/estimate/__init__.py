"""What a stage will weigh, predicted before it is loaded. No torch at import."""
