"""OpenAI's responses: conversations as items, with streams of their own."""
