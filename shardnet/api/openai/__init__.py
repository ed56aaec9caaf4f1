"""The endpoints of OpenAI: chat completions, completions, models; and tokens."""
