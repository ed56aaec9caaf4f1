"""ModelConfig, the fields of config.json, and quantisation. No torch."""
