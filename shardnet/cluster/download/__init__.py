"""Models from the Hub and from URLs."""
