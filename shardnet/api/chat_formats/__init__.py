"""What models write, as reasoning, content and tool calls. Pure."""
