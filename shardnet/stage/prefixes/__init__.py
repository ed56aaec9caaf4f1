"""Keys and values of finished prompts on disk, and back in a slot."""
