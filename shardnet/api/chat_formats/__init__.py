"""Chat formats: what a model writes as reasoning, content and tool calls."""
